"""The cheapest casts by another solver: an integer program over the same graph, all axes at once."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix


class Program:
    """Rows ``sum(coefficient * variable) >= bound`` over variables that are 0 or 1."""

    def __init__(self):
        self.index, self.rows, self.cost, self.least, self.most = {}, [], {}, {}, {}

    def variable(self, *key):
        return self.index.setdefault(key, len(self.index))

    def implies(self, one, other):
        """Where ``one`` is 1, so is ``other``."""
        self.rows.append(({other: 1, one: -1}, 0))

    def fix(self, variable, value):
        self.least[variable] = self.most[variable] = int(value)

    def solve(self):
        size = len(self.index)
        if not size:
            return 0
        matrix, bounds = lil_matrix((len(self.rows), size)), np.zeros(len(self.rows))
        for number, (terms, bound) in enumerate(self.rows):
            bounds[number] = bound
            for variable, factor in terms.items():
                matrix[number, variable] += factor
        vector = [
            np.array([d.get(i, default) for i in range(size)], float)
            for d, default in ((self.cost, 0), (self.least, 0), (self.most, 1))
        ]
        found = milp(
            vector[0],
            constraints=LinearConstraint(matrix.tocsr(), bounds, np.inf),
            bounds=Bounds(vector[1], vector[2]),
            integrality=np.ones(size),
        )
        assert found.success, found.message
        return round(found.fun)


def cheapest_bytes(graph):
    """What the psums of the cheapest casts sum, on each device.

    Args:
      graph: the graph of a linear program.
    """
    program = Program()
    values = list(dict.fromkeys(graph.values.values()))
    for axis in graph.jax.manual_axes():
        made = {one: program.variable("made", one, axis) for one in values}
        used = {one: program.variable("used", one, axis) for one in values}
        for one in values:
            program.implies(made[one], used[one])
            if not one.castable or axis in one.narrow:
                program.implies(used[one], made[one])
            elif one.live:
                cast = program.variable("cast", one)
                program.cost[cast] = one.cast_bytes
                program.rows.append(({cast: 1, used[one]: -1, made[one]: 1}, 0))
            if axis in one.stays:
                program.fix(used[one], False)
        for one in graph.inputs:
            program.fix(made[one], axis in one.varying)
        for one in graph.ends:
            if axis in one.varying:
                program.fix(used[one], True)
        for number, step in enumerate(graph.steps):
            if step.fixes(axis):
                for one in step.inputs:
                    if axis in one.varying:
                        program.fix(used[one], True)
                for one in step.outputs:
                    program.fix(made[one], axis in one.varying)
                continue
            varies = program.variable("step", number, axis)
            if axis in step.sums_bytes:
                stays = program.variable("sums", number)
                program.cost[stays] = max(program.cost.get(stays, 0), step.sums_bytes[axis])
                program.rows.append(({stays: 1, varies: 1}, 1))
                for one in step.outputs:
                    program.fix(made[one], axis in one.varying)
            else:
                if axis in step.needed:
                    program.least[varies] = 1
                for one in step.outputs:
                    program.implies(varies, made[one])
                    program.implies(made[one], varies)
            for one in step.inputs:
                program.implies(varies, (made if step.ties else used)[one])
                if step.ties or axis in one.varying:
                    program.implies(made[one], varies)
    return program.solve()
