"""The least and the most axes over which each tangent of a linear program may vary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardrules.hooks.casts.linear import NONE, Axes, Graph, Step, Value


@dataclasses.dataclass
class Labels:
    """The axes over which each tangent varies where it is made and used, and those of each step."""

    # A use that needs fewer axes than ``used`` reads the value before the cast.

    made: dict[Value, Axes]
    used: dict[Value, Axes]
    steps: dict[Step, Axes]

    def with_axes(self, axes: Axes, other: Labels) -> Labels:
        """Return these labels, with ``axes`` taken from ``other``."""
        mine, others = parts(self), parts(other)
        return Labels(
            *(
                {key: (label - axes) | (its[key] & axes) for key, label in own.items()}
                for own, its in zip(mine, others)
            )
        )


def parts(labels: Labels) -> tuple[dict[Any, Axes], dict[Any, Axes], dict[Any, Axes]]:
    """Return the labels of tangents where made, of tangents where used, and of steps."""
    return labels.made, labels.used, labels.steps


class Limits:
    """The least and the most that each label can be; ValueError if no labels suit the program."""

    def __init__(self, graph: Graph):
        self.every = frozenset(graph.door.manual_axes())
        self.graph = graph
        self.values = list(graph.values.values())
        self.fixed = {s: self.every if s.fixed is None else s.fixed for s in graph.steps}
        # A tangent that is used as varying over these axes has to be made varying over them.
        self.stuck = {v: v.narrow if v.castable else self.every for v in self.values}
        self.low = self._least()
        self.high = self._most()
        for low, high in zip(parts(self.low), parts(self.high)):
            if any(label - high[key] for key, label in low.items()):
                raise ValueError("no casts suit the program")
        # The labels that are not settled yet: tangents where made, tangents where used, steps.
        self.free = [
            [key for key, label in low.items() if label != high[key]]
            for low, high in zip(parts(self.low), parts(self.high))
        ]
        self.free[1] = list(dict.fromkeys(self.free[1] + self.free[0]))
        some = NONE.union(
            *(
                most[k] - axes
                for low, most in zip(parts(self.low), parts(self.high))
                for k, axes in low.items()
            )
        )
        self.axes = [axis for axis in graph.door.manual_axes() if axis in some]
        self.rules = list(self._rules())

    def _rules(self) -> Iterator[tuple[tuple[int, Any], tuple[int, Any], Axes]]:
        """Yield a label, the label that takes its axes, and which; 0 made, 1 used, 2 a step's."""
        made, used, steps = map(set, self.free)
        for value in self.free[1]:
            if self.stuck[value]:
                yield (1, value), (0, value), self.stuck[value]
        for step in self.free[2]:
            free, me = self.every - self.fixed[step], (2, step)
            for value in step.inputs:
                if value in used:
                    yield me, (0 if step.ties else 1, value), free
                    # What was not invariant as traced can't come back.
                    yield (0, value), me, free if step.ties else free & value.varying
            for value in step.outputs:
                if value in made:
                    yield me, (0, value), free - step.moves
                    yield (0, value), me, free - step.moves

    def _least(self) -> Labels:
        made, used = dict.fromkeys(self.values, NONE), dict.fromkeys(self.values, NONE)
        steps = dict.fromkeys(self.graph.steps, NONE)
        for value in self.graph.inputs:
            made[value] = used[value] = value.varying
        for value in self.graph.ends:
            used[value] |= value.varying
            made[value] |= used[value] & self.stuck[value]
        order, changed = self.graph.steps, True
        while changed:
            changed = False
            for step in order:
                fixed, before = self.fixed[step], steps[step]
                over = before | (step.needed - fixed)
                for value in step.inputs:
                    over |= (made[value] if step.ties else made[value] & value.varying) - fixed
                for value in step.outputs:
                    over |= made[value] - fixed - step.moves
                given = fixed | step.moves
                for value in step.inputs:
                    more = made[value] | (over if step.ties else NONE)
                    want = used[value] | over | (value.varying & fixed) | more
                    more |= want & self.stuck[value]
                    if want != used[value] or more != made[value]:
                        used[value], made[value], changed = want, more, True
                for value in step.outputs:
                    more = made[value] | (over - given) | (value.varying & given)
                    more |= used[value] & self.stuck[value]
                    if more != made[value]:
                        made[value], changed = more, True
                        used[value] |= more
                if over != before:
                    steps[step], changed = over, True
            order = order[::-1]
        return Labels(made, used, steps)

    def _most(self) -> Labels:
        made = dict.fromkeys(self.values, self.every)
        used = {value: self.every - value.stays for value in self.values}
        steps = {step: self.every - self.fixed[step] for step in self.graph.steps}
        for value in self.graph.inputs:
            made[value] = value.varying
        for step in self.graph.steps:
            given = self.fixed[step] | step.moves
            for value in step.outputs:
                made[value] &= value.varying | (self.every - given)
        order, changed = self.graph.steps, True
        while changed:
            changed = False
            for step in order:
                fixed, over = self.fixed[step], steps[step]
                for value in step.inputs:
                    over &= made[value] if step.ties else used[value]
                for value in step.outputs:
                    over &= made[value] | fixed | step.moves
                free = self.every - fixed - step.moves
                for value in step.inputs:
                    # What was not invariant as traced can't come back.
                    tied = self.every - fixed if step.ties else value.varying - fixed
                    less = made[value] & used[value] & (over | (self.every - tied))
                    some = used[value] & (less | (self.every - self.stuck[value]))
                    if less != made[value] or some != used[value]:
                        made[value], used[value], changed = less, some, True
                for value in step.outputs:
                    less = made[value] & used[value] & (over | (self.every - free))
                    some = used[value] & (less | (self.every - self.stuck[value]))
                    if less != made[value] or some != used[value]:
                        made[value], used[value], changed = less, some, True
                if over != steps[step]:
                    steps[step], changed = over, True
            order = order[::-1]
        return Labels(made, used, steps)
