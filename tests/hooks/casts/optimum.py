"""The cheapest casts by other solvers, over the same graph: HiGHS for all axes, networkx for one."""

from __future__ import annotations

import networkx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix


class Program:
    """Variables that are 0 or 1: what one asks of another, and what is paid.

    Args:
      graph: the graph of a linear program.
      axes: the mesh axes over which its tangents are placed.
    """

    def __init__(self, graph, axes):
        self.index, self.implied, self.fixed, self.paid = {}, [], {}, []
        # What a step sums over an axis that can't be moved is paid in any case.
        always = [
            (count, (step, own))
            for step in graph.steps
            for own, (count, over) in enumerate(step.sums)
            if over - step.moves
        ]
        self.always, left_out = sum(count for count, _ in always), {key for _, key in always}
        values = list(dict.fromkeys(graph.values.values()))
        for axis in axes:
            made = {one: self.variable("made", one, axis) for one in values}
            used = {one: self.variable("used", one, axis) for one in values}
            for one in values:
                self.implies(made[one], used[one])
                if not one.castable or axis in one.narrow:
                    self.implies(used[one], made[one])
                elif one.live:
                    self.paid.append((one, one.cast_bytes, used[one], made[one]))
                if axis in one.stays:
                    self.fixed[used[one]] = False
            for one in graph.inputs:
                self.fixed[made[one]] = axis in one.varying
            for one in graph.ends:
                if axis in one.varying:
                    self.fixed[used[one]] = True
            for number, step in enumerate(graph.steps):
                if step.fixed is None or axis in step.fixed:
                    self.fixed.update(
                        {used[one]: True for one in step.inputs if axis in one.varying}
                    )
                    self.fixed.update({made[one]: axis in one.varying for one in step.outputs})
                    continue
                varies = self.variable("step", number, axis)
                if axis in step.moves:
                    for own, (count, over) in enumerate(step.sums):
                        if axis in over and (step, own) not in left_out:
                            self.paid.append(((step, own), count, None, varies))
                    self.fixed.update({made[one]: axis in one.varying for one in step.outputs})
                else:
                    if axis in step.needed:
                        self.fixed[varies] = True
                    for one in step.outputs:
                        self.implies(varies, made[one])
                        self.implies(made[one], varies)
                for one in step.inputs:
                    self.implies(varies, (made if step.ties else used)[one])
                    if step.ties or axis in one.varying:
                        self.implies(made[one], varies)

    def variable(self, *key):
        return self.index.setdefault(key, len(self.index))

    def implies(self, one, other):
        """Where ``one`` is 1, so is ``other``."""
        self.implied.append((one, other))

    def integer_program(self):
        """What is paid at the least; of one thing that is paid for over several axes, the most."""
        things = {}
        for thing, count, _, _ in self.paid:
            place, most = things.get(thing, (len(self.index) + len(things), 0))
            things[thing] = place, max(most, count)
        size = len(self.index) + len(things)
        if not things:
            return self.always
        rows = [({other: 1, one: -1}, 0) for one, other in self.implied]
        for thing, _, one, without in self.paid:
            row = {things[thing][0]: 1, without: 1}
            rows.append((row, 1) if one is None else (row | {one: -1}, 0))
        matrix = lil_matrix((len(rows), size))
        for number, (terms, _) in enumerate(rows):
            for variable, factor in terms.items():
                matrix[number, variable] += factor
        cost, least, most = np.zeros(size), np.zeros(size), np.ones(size)
        for place, count in things.values():
            cost[place] = count
        for variable, value in self.fixed.items():
            least[variable] = most[variable] = value
        found = milp(
            cost,
            constraints=LinearConstraint(matrix.tocsr(), [bound for _, bound in rows], np.inf),
            bounds=Bounds(least, most),
            integrality=np.ones(size),
        )
        assert found.success, found.message
        return round(found.fun) + self.always

    def minimum_cut(self):
        """The same for one axis: what is 1 stands at the sink's side of a cut."""
        net = networkx.DiGraph()
        net.add_nodes_from(("source", "sink"))
        for one, other in self.implied:
            net.add_edge(other, one)  # an edge that has no capacity can take everything
        for variable, value in self.fixed.items():
            net.add_edge(*((variable, "sink") if value else ("source", variable)))
        for number, (_, count, one, without) in enumerate(self.paid):
            # By a node of its own: an edge without a capacity may stand between the two.
            net.add_edge(without, ("paid", number), capacity=count)
            net.add_edge(("paid", number), "sink" if one is None else one)
        return networkx.minimum_cut_value(net, "source", "sink") + self.always


def _axes(graph):
    """The axes over which anything is cast or summed."""
    return [
        axis
        for axis in graph.counted
        if any(axis in made.varying - value.varying for value, made in graph.casts)
        or any(axis in step.moves for step in graph.steps)
    ]


def cheapest_bytes(graph):
    """What the psums of the cheapest casts sum, on each device, by an integer program.

    Args:
      graph: the graph of a linear program.
    """
    return Program(graph, graph.counted).integer_program()


def cut_bytes(graph):
    """The same by networkx' minimum cut; None where something is cast over several axes.

    Args:
      graph: the graph of a linear program.
    """
    axes = _axes(graph)
    return Program(graph, axes).minimum_cut() if len(axes) == 1 else None
