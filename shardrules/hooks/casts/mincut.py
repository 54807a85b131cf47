"""Find the minimum cut of a small directed graph by Dinic's algorithm.

Y. Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation",
Soviet Mathematics Doklady 11 (1970). It is written here since no dependency of the package has it.
"""

from __future__ import annotations

import collections

INFINITE = 1 << 100  # Python's integers don't overflow, and no sum of bytes comes near it


class Network:
    def __init__(self) -> None:
        self._heads: list[int] = []
        self._left: list[int] = []  # each edge's residual capacity; the reverse of edge e is e ^ 1
        self._edges: list[list[int]] = []
        self._total = 0
        self._reached: set[int] | None = None  # nodes reached from the source at maximum flow
        self.source, self.sink = self.node(), self.node()

    def node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, tail: int, head: int, capacity: int = INFINITE) -> int:
        """Add an edge; a cut pays its capacity if ``tail`` is on the source's side only."""
        number = len(self._heads)
        self._heads += head, tail
        self._left += capacity, 0
        self._edges[tail] += (number,)
        self._edges[head] += (number + 1,)
        self._reached = None
        return number

    def sent(self, edge: int) -> int:
        return self._left[edge ^ 1]

    def flow(self) -> int:
        """Return the maximum flow; raise ValueError if each cut has an infinite edge."""
        # Compute the levels of all nodes, and saturate the shortest paths. Repeat until no path
        # leads from the source to the sink. The shortest paths get longer in each round, so there
        # are fewer rounds than nodes. The nodes that the source still reaches are its side of a
        # minimum cut.
        while self._reached is None:
            level = self._levels()
            if self.sink in level:
                self._block(level)
            else:
                self._reached = set(level)
        return self._total

    def sink_side(self) -> set[int]:
        """Return the nodes on the sink's side of the minimum cut that is nearest to the sink."""
        self.flow()
        side, queue = {self.sink}, [self.sink]
        while queue:
            for edge in self._edges[queue.pop()]:
                tail = self._heads[edge]
                if self._left[edge ^ 1] and tail not in side:
                    side.add(tail)
                    queue.append(tail)
        return side

    def source_side(self) -> set[int]:
        """Return the nodes on the source's side of the minimum cut nearest to the source."""
        self.flow()
        assert self._reached is not None
        return self._reached

    def _levels(self) -> dict[int, int]:
        """Return the distance from the source of each node that can still be reached."""
        level, queue = {self.source: 0}, collections.deque([self.source])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if self._left[edge] and head not in level:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _block(self, level: dict[int, int]) -> None:
        """Saturate all shortest paths, one path at a time and without recursion."""
        # Extend a path along edges with residual capacity to the next level. At the sink, send as
        # much as the path can take, and go back to the first full edge. At a dead end, go back one
        # edge and never try that edge again. This ends, since each node's list of edges to try only
        # shrinks, and each path to the sink fills an edge.
        todo = [list(edges) for edges in self._edges]
        path: list[int] = []
        while True:
            node = self._heads[path[-1]] if path else self.source
            if node == self.sink:
                amount = min(self._left[edge] for edge in path)
                if 2 * amount > INFINITE:
                    raise ValueError("each cut takes an edge of infinite capacity")
                self._total += amount
                for edge in path:
                    self._left[edge] -= amount
                    self._left[edge ^ 1] += amount
                full = next(i for i, edge in enumerate(path) if not self._left[edge])
                del path[full:]
                continue
            while todo[node]:
                edge = todo[node][-1]
                if self._left[edge] and level.get(self._heads[edge]) == level[node] + 1:
                    path.append(edge)
                    break
                todo[node].pop()
            else:
                if not path:
                    return
                todo[self._heads[path.pop() ^ 1]].pop()
