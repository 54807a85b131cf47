"""Arguments for each public function of jax.numpy, lax, scipy, nn, random: from its signature.

An argument is one letter: what ``draw`` makes of it from a seed, so that devices get different
data of one shape. A function is called with the first letters of a ladder that it takes, once with
floats and once with integers; ``SPECIAL`` has those that need more than that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .special import BY_DEVICE, SPECIAL, N, key


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call a function.

    Args:
      name: the function's, and how it is called where it is called in several ways.
      function: of arrays only.
      letters: one for each array.
      axes: the mesh axes over which each array varies; by default each over another one.
      by_device: whether devices may get different results from the same operands.
      unexecuted: of a primitive that CPUs don't have, the axes over which its outputs vary beside
        its operands'; None of others.
    """

    name: str
    function: Any
    letters: str
    axes: tuple[tuple[str, ...], ...] | None = None
    by_device: bool = False
    unexecuted: frozenset[str] | None = None

    def arguments(self, seed):
        """Return the arrays that a device with this seed gets."""
        return [
            draw(letter, np.random.default_rng([seed, place]))
            for place, letter in enumerate(self.letters)
        ]


def draw(letter: str, rng: np.random.Generator):
    """Return an array of a kind: floats within (0, 1), matrices positive definite, keys as data."""
    if letter == "M":
        square = rng.uniform(0.02, 0.12, (N, N))
        return (square + square.T + np.diag(rng.uniform(0.5, 0.7, N))).astype(np.float32)
    if letter == "T":  # batch, height, width, features
        return rng.uniform(0.1, 0.9, (2, N, N, 2)).astype(np.float32)
    if letter == "W":  # a convolution's weight: height, width, in, out
        return rng.uniform(0.1, 0.9, (2, 2, 2, 2)).astype(np.float32)
    if letter == "L":  # longer than any window
        return rng.uniform(0.1, 0.9, 64).astype(np.float32)
    if letter == "o":
        return np.sort(rng.uniform(0.1, 0.9, N)).astype(np.float32)
    if letter == "2":
        return rng.uniform(0.1, 0.9, 2).astype(np.float32)
    shape = {"v": (N,), "s": (), "i": (N,), "I": (N, N), "n": (), "b": (N,), "B": (N, N), "p": ()}
    if letter in "vs":
        return np.asarray(rng.uniform(0.1, 0.9, shape[letter]), np.float32)
    if letter in "iIn":
        return np.asarray(rng.integers(0, N, shape[letter]), np.int32)
    if letter in "bBp":
        return np.asarray(rng.integers(0, 2, shape[letter]), bool)
    if letter == "C":
        return (rng.uniform(0.1, 0.9, (N, N)) + 1j * rng.uniform(0.1, 0.9, (N, N))).astype(
            np.complex64
        )
    if letter == "U":
        return rng.integers(0, 2**32, (N,), np.uint32)
    if letter == "8":
        return rng.integers(0, 256, (N,), np.uint8)
    assert letter == "k"
    return rng.integers(0, 2**32, (2,), np.uint32)


# What a parameter of this name gets, where it is no array.
STATIC = {
    "shape": (N,),
    "newshape": (2, 2 * N),
    "axis": 0,
    "axes": (0, 1),
    "dtype": np.float32,
    "new_dtype": np.float32,
    "dimension": 0,
    "num_segments": N,
    "num_classes": N,
    "minlength": N,
    "decimals": 1,
    "source": 0,
    "destination": 1,
    "axis1": 0,
    "axis2": 1,
    "repeats": 2,
    "reps": 2,
    "k": 2,
    "kth": 1,
    "deg": 2,
    "indices_or_sections": 2,
    "exponent_bits": 4,
    "mantissa_bits": 3,
    "N": N,
    "M": N,
    "ndim": 2,
    "num": 3,
    "rank": 3,
    "sizes": (1,),
    "pad_width": 1,
    "factor": 2,
    "d": 2,
    "fun": jnp.sin,
    "func": jnp.sin,
    "func1d": jnp.sum,
    "subscripts": "ij,jk",
    "approximate": True,
    "size": N,
    "total_repeat_length": N,
    "start_index": 1,
    "limit_index": 3,
    "slice_size": 2,
    "start_indices": (1, 1),
    "limit_indices": (3, 3),
    "slice_sizes": (2, 2),
    "padding_config": [(1, 1, 0), (0, 0, 0)],
    "dimensions": (0,),
    "broadcast_dimensions": (0, 1),
    "permutation": (1, 0),
    "start_dimension": 0,
    "stop_dimension": 2,
    "window_dimensions": (2, 2),
    "window_strides": (1, 1),
    "padding": "VALID",
    "dimension_numbers": (((1,), (0,)), ((), ())),
    "fft_type": "fft",
    "fft_lengths": (N,),
    "nperseg": 16,
    "order": 1,
    "trans": 0,
    "max_iterations": 3,
}
# Parameters that no array is tried for.
NOT_ARRAYS = {
    *(
        "precision",
        "preferred_element_type",
        "out_sharding",
        "out",
        "order",
        "dtype",
        "mode",
        "kind",
    ),
    *(
        "axis",
        "keepdims",
        "device",
        "copy",
        "method",
        "fill_value_dtype",
        "shape",
        "inplace",
        "side",
    ),
    *("impl", "axes", "norm", "algorithm", "symmetrize_input", "size", "total_repeat_length"),
    *("implementation", "name", "sharding", "promote_integers", "increasing", "unique_indices"),
    *(
        "overwrite_a",
        "overwrite_b",
        "check_finite",
        "indices_are_sorted",
        "num_keys",
        "precondition",
    ),
}
STRUCTURED = ("M", "v", "s", "L", "T")
INTEGER = ("I", "i", "n", "U")


def modules():
    """Return the modules whose functions are swept, by name."""
    import jax.scipy

    names = ["jax.numpy", "jax.numpy.linalg", "jax.numpy.fft", "jax.lax", "jax.lax.linalg"]
    names += ["jax.nn", "jax.nn.initializers", "jax.random", "jax.image", "jax.ops"]
    names += [one.name for one in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy.")]
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            continue
    return found


def functions(module):
    """Return a module's public functions, by name."""
    return {
        name: one
        for name, one in sorted(vars(module).items())
        if not name.startswith("_")
        and callable(one)
        and not inspect.isclass(one)
        and not inspect.ismodule(one)
    }


@functools.lru_cache(maxsize=None)
def cases(module_name: str):
    """Return the cases of a module, and the functions that could not be called.

    Args:
      module_name: a key of ``modules()``.

    Returns:
      (cases, names of functions that return arrays for none of the letters).
    """
    found, failed = [], []
    short = module_name.removeprefix("jax.")
    for name, function in functions(modules()[module_name]).items():
        full = f"{short}.{name}"
        if full in SPECIAL:
            several = SPECIAL[full]
            several = several if isinstance(several, list) else [several]
            made = [
                Case(
                    full if not place else f"{full}#{place}",
                    special,
                    letters,
                    by_device=full in BY_DEVICE,
                )
                for place, (letters, special) in enumerate(several)
            ]
            made = [case for case in made if works(case)]
        else:
            made = from_signature(full, function)
        found += made
        if not made:
            failed.append(full)
    return found, failed


def works(case):
    """Whether a call returns an array of arrays."""
    try:
        out = jax.eval_shape(case.function, *case.arguments(0))
    except Exception:
        return False
    return any(hasattr(leaf, "dtype") for leaf in jax.tree_util.tree_leaves(out))


def from_signature(name, function):
    """Return the cases that a function's signature gives: floats, integers, optional arrays."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return []
    required = [p for p in parameters if p.default is p.empty and p.kind not in (2, 3, 4)]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    keywords = {
        p.name: STATIC[p.name]
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name in STATIC
    }
    made = []
    for ladder in (STRUCTURED, INTEGER):
        for letters, build in attempts(required, several, ladder):
            case = Case(name, functools.partial(_call, function, build, keywords), letters)
            if letters and works(case):
                made.append(case)
                break
    if made:
        first = made[0]
        for parameter in parameters:
            if parameter.kind in (2, 4) or parameter in required or not optional(parameter):
                continue
            for letter in ("s", first.letters[-1], "v", "n", "B", "b"):
                case = Case(
                    f"{name}({parameter.name}=)",
                    functools.partial(_with_keyword, first.function, parameter.name),
                    first.letters + letter,
                )
                if works(case):
                    made.append(case)
                    break
    return [
        dataclasses.replace(
            case, name=f"{case.name}#{place}" if place and "(" not in case.name else case.name
        )
        for place, case in enumerate(made)
    ]


def optional(parameter):
    """Whether an optional parameter may be an array."""
    return parameter.name not in NOT_ARRAYS and not isinstance(
        parameter.default, (bool, str, tuple)
    )


def _call(function, build, keywords, *arrays, **more):
    return function(*build(arrays), **keywords, **more)


def _with_keyword(function, name, *arrays):
    return function(*arrays[:-1], **{name: arrays[-1]})


def attempts(required, several, ladder):
    """Yield (letters, from arrays to the positional arguments), the simplest first."""
    kinds = []  # of each parameter: a letter to choose, a key, or a static value
    for parameter in required:
        if parameter.name in ("key", "rng") or parameter.name == "keys":
            kinds.append("k")
        elif parameter.name in STATIC:
            kinds.append(("static", STATIC[parameter.name]))
        elif parameter.name in ("arrays", "tup", "seq", "operands", "xs", "arys", "choicelist"):
            kinds.append("several")
        else:
            kinds.append("array")
    if several and not required:
        kinds += ["array", "array"]
    free = kinds.count("array")
    uniform = [(letter,) * free for letter in ladder]
    mixed = []
    if 1 < free <= 4:
        both = ladder[:2] + (("i", "n") if ladder is STRUCTURED else ("v",))
        mixed = [one for one in itertools.product(both, repeat=free) if len(set(one)) > 1][:40]
    for chosen in uniform + mixed:
        chosen_left, letters, plan = iter(chosen), "", []
        for kind in kinds:
            if kind == "k":
                plan.append(("key", len(letters)))
                letters += "k"
            elif kind == "several":
                plan.append(("list", len(letters)))
                letters += ladder[0] * 2
            elif kind == "array":
                plan.append(("array", len(letters)))
                letters += next(chosen_left)
            else:
                plan.append(kind)
        yield letters, functools.partial(_build, tuple(plan))


def _build(plan, arrays):
    built = []
    for what, value in plan:
        if what == "key":
            built.append(key(arrays[value]))
        elif what == "list":
            built.append([arrays[value], arrays[value + 1]])
        else:
            built.append(arrays[value] if what == "array" else value)
    return built
