"""Random programs as data: blocks of instructions on values of eight floats."""

from __future__ import annotations

import dataclasses
import inspect
import random
from typing import Any

import jax

from .operations import AXES, CUSTOM, LOCAL, WITH_INTEGER

SPECS = [(), ("a",), ("b",), ("a", "b")]
UNGROUPED = ("psum", "pmean", "ppermute", "all_gather_invariant")
GROUPS = {"a": [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]]], "b": [None]}


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction.

    Args:
      kind: the name of a method of ``Machine``.
      inputs: places of values.
      options: what else the kind needs.
      blocks: the programs inside.
    """

    kind: str
    inputs: tuple[int, ...]
    options: tuple[Any, ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """Instructions on the values of ``count`` arguments; the last value is the result."""

    count: int
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A block on floats and one integer for each device.

    Args:
      specs: the mesh axes of each float argument.
      integer: those of the integer.
      mode: where the gradient is taken: outside of the shard_map (``typed``: of every value, each
        under the spec that its type allows), inside, or forward.
      casts: where casts stand, as ``install`` takes it.
    """

    seed: int
    specs: tuple[tuple[str, ...], ...]
    integer: tuple[str, ...]
    block: Block
    mode: str
    casts: str = "late"


class Generator:
    """Makes one program; every choice comes from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed = seed
        self.mapped = False  # JAX can't map an all_to_all in groups

    def program(self):
        specs = tuple(self.random.choice(SPECS) for _ in range(3))
        integer = self.random.choice(SPECS)
        modes = ["outside", "typed", "typed", "inside", "forward", "hessian"]
        mode = self.random.choice(modes)
        reverse = mode in ("outside", "typed")
        block = self.block(len(specs), self.random.randint(4, 7), True, 2, reverse)
        casts = self.random.choice(["late", "cheapest"])
        return Program(self.seed, specs, integer, block, mode, casts)

    def block(self, count, length, communicates, depth, reverse):
        """Return a block.

        Args:
          communicates: whether all devices run it alike.
          depth: how many blocks may stand inside each other.
          reverse: whether custom_vjps may stand in it: no forward derivative is taken.
        """
        steps = []
        for _ in range(length):
            steps.append(self.step(count + len(steps), communicates, depth, reverse))
        return Block(count, tuple(steps))

    def inside(self, count, communicates, depth, reverse):
        return self.block(count, self.random.randint(1, 3), communicates, depth - 1, reverse)

    def step(self, values, communicates, depth, reverse):
        choose = self.random.choice

        def pick(count):
            # Late values more often: else most are not used.
            return tuple(
                max(self.random.randrange(values), self.random.randrange(values))
                for _ in range(count)
            )

        kinds = ["plain"] * 3 + ["integer"] * 2 + ["custom jvp", "axis_index", "vary"]
        if reverse:
            kinds += ["custom"] * 3 + ["shares"] * 2
        if communicates:
            kinds += ["collective"] * 4
            if reverse:
                kinds += ["reducing", "straight"]
        if depth:
            kinds += ["cond", "closed_cond", "switch", "scan", "scan_from_zeros", "while_loop"]
            kinds += ["fori", "remat", "jit", "vmap", "jvp", "linearize"]
            if reverse:
                kinds += ["custom_block"] * 2
            if communicates and reverse:
                kinds += ["grad", "vjp"]
        if hasattr(jax, "new_ref") and depth == 2:
            kinds += ["ref", "accumulate"]
        kind = choose(kinds)
        if kind == "plain":
            name = choose(list(LOCAL))
            count = LOCAL[name].__code__.co_argcount
            return Step("plain", pick(count), (name,))
        if kind == "integer":
            return Step("integer", pick(1), (choose(list(WITH_INTEGER)),))
        if kind == "custom jvp":
            return Step("custom", pick(2), (choose(["jvp rule", "jvp rule of a kernel"]),))
        if kind == "custom":
            return Step("custom", pick(2), (choose(list(CUSTOM)),))
        if kind == "axis_index":
            return Step(kind, pick(1), (choose(list(AXES)),))
        if kind == "vary":
            return Step(kind, pick(1), (choose(SPECS[1:]),))
        if kind == "shares":
            how = choose(["returned", "summed", "already summed", "summed as called"])
            return Step(kind, pick(2), (how,))
        if kind == "straight":
            return Step(kind, pick(2))
        if kind == "collective":
            return self.collective(pick)
        if kind == "reducing":
            name = choose(["psum", "pmean", "gather"] * 3 + ["identity", "gathered loss"])
            everywhere = name != "identity" or self.random.random() < 0.2
            return Step(kind, pick(1), (name, choose(list(AXES)), everywhere))
        if kind in ("ref", "accumulate"):
            return Step(kind, pick(2))
        if kind == "cond":
            same = choose([None, True]) if communicates else None
            place = choose([None, 0, 3]) if same is None else None
            both = tuple(self.inside(2, communicates and bool(same), depth, reverse) for _ in "12")
            return Step(kind, pick(2), (place, same), both)
        if kind == "closed_cond":
            blocks = tuple(self.inside(2, False, depth, reverse) for _ in "12")
            return Step(kind, pick(2), (), blocks)
        if kind == "switch":
            same = communicates and choose([True, False])
            blocks = tuple(self.inside(2, same, depth, reverse) for _ in "123")
            return Step(kind, pick(2), (same,), blocks)
        if kind == "while_loop":
            same = communicates and choose([True, False])
            block = self.inside(2, same, depth, reverse)
            return Step(kind, pick(2), (same,), (block,))
        forward = kind in ("jvp", "linearize")
        mapped, self.mapped = self.mapped, self.mapped or kind == "vmap"
        count = 3 if kind == "scan" else 2
        block = self.inside(count, communicates, depth, reverse and not forward)
        self.mapped = mapped
        options = ()
        if kind == "custom_block":
            options = (choose(["pullback", "again"]),)
        elif kind == "grad":
            options = (choose(SPECS),)
        return Step(kind, pick(count + (forward or kind == "vjp")), options, (block,))

    def collective(self, pick):
        choose = self.random.choice
        name = choose(
            ["psum", "pmean", "pmax", "pmin", "all_gather", "all_gather_tiled", "psum_scatter"]
            + ["psum_scatter_tiled", "all_to_all", "ppermute"]
            + ["all_gather_invariant"] * ("to" in inspect.signature(jax.lax.all_gather).parameters)
        )
        axes = choose([("a",), ("a",), ("b",), ("a", "b")])
        groups = None
        if len(axes) == 1 and name not in UNGROUPED and not self.mapped:
            groups = choose(GROUPS[axes[0]])
        return Step("collective", pick(1), (name, axes, groups))
