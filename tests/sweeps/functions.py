"""Every function of JAX under shard_map's check: what is typed invariant is equal on all devices.

Operand i of a function varies over mesh axis i of three, and nothing else does. An output that is
typed invariant over an axis is returned from each device and compared bit by bit along that axis;
so is each tangent of ``jax.jvp`` (of varying primals, and of invariant ones whose tangents vary)
and each cotangent of ``jax.grad``, whose values are compared with one device's too.

    python -m tests.sweeps.functions [module ...]
"""

from __future__ import annotations

import dataclasses
import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import hooks

AXES = ("a", "b", "c")
MODES = ("value", "jvp", "tangent", "gradient")


@dataclasses.dataclass
class Found:
    """What a sweep found.

    Args:
      refused: from a case to the error that it met inside shard_map, and not outside.
      invariant: from a case to each (output, axes) that is typed invariant over axes of operands
        that vary.
      wrong: from a case to each of those whose copies differ, or whose values are wrong.
      unexecuted: from a case to why those could not be executed here.
      primitives: the names of all primitives that were traced.
      count: how many cases were traced.
    """

    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    invariant: dict[str, list] = dataclasses.field(default_factory=dict)
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    unexecuted: dict[str, str] = dataclasses.field(default_factory=dict)
    primitives: set[str] = dataclasses.field(default_factory=set)
    count: int = 0


def inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def leaves(tree):
    """Return the arrays of a tree; keys as their data."""
    found = []
    for leaf in jax.tree_util.tree_leaves(tree):
        leaf = jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.append(leaf)
    return found


# What is traced of a case: from (its function, primals, tangents) to arrays.


def value(f, args, _):
    return leaves(f(*args))


def derivative(f, args, tangents):
    """The function's derivative along tangents of its float arguments."""
    floats = [place for place, x in enumerate(args) if inexact(x)]

    def of_floats(*floating):
        full = list(args)
        for place, x in zip(floats, floating):
            full[place] = x
        return [y for y in leaves(f(*full)) if inexact(y)]

    return jax.jvp(of_floats, [args[p] for p in floats], [tangents[p] for p in floats])


def tangents_of(f, args, tangents):
    primals, out = derivative(f, args, tangents)
    return primals + out


def loss_of(f, args):
    """A scalar that each element of the outputs enters with another weight."""
    total = 0.0
    for y in leaves(f(*args)):
        if inexact(y):
            weights = np.cos(np.arange(np.prod(y.shape, dtype=int))).reshape(y.shape)
            total += (jnp.real(y) * weights.astype(np.float32)).sum()
    return total


def gradient(f, args, _):
    floats = tuple(place for place, x in enumerate(args) if inexact(x))
    loss, pull = jax.vjp(
        lambda *floating: loss_of(f, _merged(args, floats, floating)), *[args[p] for p in floats]
    )
    return [loss, *pull(jnp.ones_like(loss))]


def _merged(args, floats, floating):
    full = list(args)
    for place, x in zip(floats, floating):
        full[place] = x
    return full


def differentiable(case):
    """Whether a case takes floats and returns some."""
    args = case.arguments(0)
    if not any(inexact(x) for x in args):
        return False
    out = jax.eval_shape(lambda *args: leaves(case.function(*args)), *args)
    return any(jnp.issubdtype(y.dtype, jnp.inexact) for y in out)


class Sweep:
    """One mode of the sweep over some cases, in one shard_map.

    Args:
      cases: what is called.
      mode: one of MODES. ``value``: the outputs; ``jvp``: tangents, where primals vary;
        ``tangent``: tangents that vary, of primals that don't; ``gradient``: cotangents.
      sizes: the mesh axes of eight devices, and their sizes.
    """

    def __init__(self, cases, mode: str, sizes=None):
        self.cases = cases
        self.mode = mode
        self.sizes = sizes or dict.fromkeys(AXES, 2)
        self.axes = tuple(self.sizes)
        self.mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(self.sizes.values())), self.axes)
        self.found = Found()
        self.traced = {"value": value, "gradient": gradient}.get(mode, tangents_of)

    def axes_of(self, case):
        """The mesh axes over which each operand varies."""
        return case.axes or [(AXES[p % len(AXES)],) for p in range(len(case.letters))]

    def inputs(self, case):
        """Return for each array: (those of all devices along its axes, the axes)."""
        counts = [
            int(np.prod([self.sizes[a] for a in axes], dtype=int)) for axes in self.axes_of(case)
        ]
        seeds = [case.arguments(seed) for seed in range(max(counts, default=1))]
        stacked = []
        for place, (axes, count) in enumerate(zip(self.axes_of(case), counts)):
            varied = np.stack([one[place] for one in seeds[:count]])
            stacked.append((varied, axes))
        if self.mode == "tangent":
            stacked = [(one[:1], ()) for one, _ in stacked]
        if self.mode in ("jvp", "tangent"):
            for place, one in enumerate(seeds[0]):
                axes = self.axes_of(case)[place] if self.mode == "tangent" else ()
                shape = (counts[place] if axes else 1, *one.shape)
                tangent = np.random.default_rng(place).uniform(0.5, 1.5, shape)
                stacked.append((tangent.astype(one.dtype if inexact(one) else np.float32), axes))
        return stacked

    def run(self):
        """Trace all cases, then execute those with an output that may be wrong."""
        traced = self.trace(self.cases)
        # What JAX does not take where each operand varies over an axis of its own: one at a time.
        alone = [
            dataclasses.replace(
                case,
                name=f"{case.name} [{place}]",
                axes=tuple(
                    (AXES[0],) if other == place else () for other in range(len(case.letters))
                ),
            )
            for case in self.cases
            if case.name in self.found.refused and not case.axes and len(case.letters) > 1
            for place in range(len(case.letters))
        ]
        traced.update(self.trace(alone))
        self.cases = [*self.cases, *alone]
        judged = [case for case in self.cases if self.interesting(case, traced.get(case.name))]
        for start in range(0, len(judged), 40):
            self.execute(judged[start : start + 40], traced)
        self.found.count = len(self.cases)
        return self.found

    def varied(self, case):
        """The axes over which an output may differ."""
        if case.by_device:
            return set(self.axes)
        floats = [inexact(x) for x in case.arguments(0)]
        return {
            axis
            for place, axes in enumerate(self.axes_of(case))
            for axis in axes
            if self.mode != "tangent" or floats[place]
        } | (case.unexecuted or set())

    def interesting(self, case, types):
        """Whether an output is typed invariant over an axis of an operand."""
        if types is None:
            return False
        left = {
            place: sorted(self.varied(case) - varying)
            for place, varying in enumerate(types)
            if self.varied(case) - varying
        }
        if left and case.unexecuted is not None and self.mode == "value":
            self.found.wrong[case.name] = f"is typed invariant over {left}"
        elif left:
            self.found.invariant[case.name] = left
        return bool(left) and case.unexecuted is None

    def trace(self, cases):
        """Return from each case's name to its outputs' varying axes."""
        types = {}
        inputs = [self.inputs(case) for case in cases]

        def body(*flat):
            flat = iter(flat)
            for case, given in zip(cases, inputs):
                args = [next(flat)[0] for _ in given]
                try:
                    types[case.name] = [varying(y, self.axes) for y in self.call(case, args)]
                except Exception as error:
                    self.found.refused[case.name] = _first_line(error)
            return ()

        mapped, flat = self.shard_map(body, inputs, ())
        try:
            primitives_of(jax.make_jaxpr(mapped)(*flat).jaxpr, self.found.primitives)
        except Exception as error:  # to JAX 0.5.3 a jaxpr is checked at its end
            if len(cases) == 1:
                self.found.refused.setdefault(cases[0].name, _first_line(error))
                return {}
            half = len(cases) // 2
            return {**self.trace(cases[:half]), **self.trace(cases[half:])}
        return types

    def call(self, case, args):
        count = len(case.letters)
        return self.traced(case.function, args[:count], args[count:])

    def shard_map(self, body, inputs, out_specs):
        """Return the function of all inputs, and these."""
        specs = tuple(P(axes) if axes else P() for given in inputs for _, axes in given)
        mapped = hooks.shard_map(body, self.mesh, specs, out_specs, check=True)
        return mapped, [x for given in inputs for x, _ in given]

    def execute(self, cases, types):
        """Return every device's copy of each output, and compare."""
        inputs = [self.inputs(case) for case in cases]

        def body(*flat):
            flat = iter(flat)
            out = []
            for case, given in zip(cases, inputs):
                args = [next(flat)[0] for _ in given]
                out.append([y[None] for y in self.call(case, args)])
            return out

        # As their types say, so that it is these that shard_map's check judges; each device's copy
        # is in its shard.
        specs = [
            [P(tuple(sorted(varying)) or None) for varying in types[case.name]] for case in cases
        ]
        mapped, flat = self.shard_map(body, inputs, specs)
        try:
            copies = jax.tree_util.tree_map(self.copies, jax.jit(mapped)(*flat))
        except Exception as error:
            if len(cases) == 1:
                self.found.unexecuted[cases[0].name] = _first_line(error)
                return
            half = len(cases) // 2
            self.execute(cases[:half], types)
            self.execute(cases[half:], types)
            return
        shape = tuple(self.sizes.values())
        for case, outputs in zip(cases, copies):
            for place, copy in enumerate(outputs):
                cube = copy.reshape(shape + copy.shape[1:])
                for axis in sorted(set(self.axes) - types[case.name][place]):
                    along = np.moveaxis(cube, self.axes.index(axis), 0)
                    if any(along[0].tobytes() != one.tobytes() for one in along[1:]):
                        self.found.wrong[case.name] = (
                            f"output {place} is typed invariant over {axis} and differs"
                        )
        if self.mode == "gradient" and self.axes == AXES:
            self.compare_with_one_device(cases, inputs, types, copies)

    def copies(self, array):
        """Return each device's copy of an array, devices first."""
        by_device = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        return np.concatenate([by_device[device] for device in self.mesh.devices.ravel()])

    def compare_with_one_device(self, cases, inputs, types, copies):
        """Compare gradients with the sums of those of the devices, each computed by itself."""

        cube_of, axes_of = (2,) * 3, self.axes_of

        def all_devices(flat):
            out = []
            for case, given in zip(cases, flat):

                def local(index, given=given, case=case):
                    args = [
                        x[index[AXES.index(axes[0])] if axes else 0]
                        for x, axes in zip(given, axes_of(case))
                    ]
                    return gradient(case.function, args, None)

                index = np.stack(np.unravel_index(np.arange(8), cube_of), 1)
                out.append(jax.vmap(local)(jnp.asarray(index)))
            return out

        flat = [[x for x, _ in given] for given in inputs]
        try:
            alone = jax.tree_util.tree_map(np.asarray, jax.jit(all_devices)(flat))
        except Exception:
            if len(cases) > 1:
                half = len(cases) // 2
                for part in (slice(None, half), slice(half, None)):
                    self.compare_with_one_device(cases[part], inputs[part], types, copies[part])
            return
        for case, outputs, reference in zip(cases, copies, alone):
            over = types[case.name][0]
            floats = [p for p, x in enumerate(case.arguments(0)) if inexact(x)]
            for place, (got, one) in enumerate(zip(outputs[1:], reference[1:])):
                summed = tuple(
                    AXES.index(axis) for axis in sorted(over - set(axes_of(case)[floats[place]]))
                )
                cube = one.reshape(cube_of + one.shape[1:])
                want = np.broadcast_to(cube.sum(summed, keepdims=True), cube.shape)
                scale = np.abs(want[np.isfinite(want)]).max(initial=1e-3)
                if not np.allclose(
                    got.reshape(cube.shape), want, rtol=2e-3, atol=2e-3 * scale, equal_nan=True
                ):
                    self.found.wrong.setdefault(
                        case.name,
                        f"the gradient of operand {floats[place]} is "
                        f"{np.asarray(got).ravel()[:3]} for {want.ravel()[:3]}",
                    )


def varying(x, axes):
    """The mesh axes over which a value varies, as its type says, on any JAX."""
    rep = getattr(x, "rep", None)
    if rep is not None:  # to JAX 0.5.3, of the tracer
        return frozenset(axes) - rep
    return hooks.varying(x)


def primitives_of(jaxpr, found):
    """Add the names of a jaxpr's primitives."""
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree_util.tree_leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                primitives_of(inner, found)


def _first_line(error):
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:150]}"


def sweep(cases, mode, sizes=None):
    """Return what one mode finds in some cases, under the hooks."""
    if mode != "value":
        cases = [case for case in cases if case.axes or differentiable(case)]
    return Sweep(cases, mode, sizes).run()


def main(names):
    import time

    from . import arguments, collectives

    modes = [name for name in names if name in MODES] or MODES
    names = [name for name in names if name not in MODES]
    with sr.install():
        for name in names or ["collectives", *arguments.modules()]:
            sizes = None
            if name == "collectives":
                cases, sizes = collectives.cases(), collectives.SIZES
            else:
                cases, _ = arguments.cases(name)
            if not cases:
                continue
            for mode in modes:
                start = time.time()
                found = sweep(cases, mode, sizes)
                print(
                    f"{name} {mode}: {found.count} cases, {len(found.refused)} refused, "
                    f"{len(found.invariant)} with invariant outputs, {len(found.wrong)} wrong, "
                    f"{time.time() - start:.1f} s",
                    flush=True,
                )
                for kind in ("refused", "invariant", "wrong", "unexecuted"):
                    if kind == "invariant" and mode != "value":
                        continue
                    for case, why in getattr(found, kind).items():
                        print(f"    {kind} {case}: {why}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
