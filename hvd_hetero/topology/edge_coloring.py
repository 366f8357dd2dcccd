"""Split the edges of a graph into few matchings: edge colouring by Misra and Gries (1992).

A matching is a set of edges of which no two meet, so its pairs can exchange at the same time. Matchings are the colours
of an edge colouring, in which edges that meet have different colours. At least Delta colours are needed (Delta is the
highest degree) and Delta + 1 are enough (Vizing); deciding whether Delta are enough is NP-complete (Holyer 1981).

With Delta + 1 colours every node has a *free* one, which none of its edges bears. To colour the edge (u, v):

1. Fan. From f_0 = v on, append a neighbour f_{k+1} of u whose edge (u, f_{k+1}) bears a colour free on f_k, until there
   is none.
2. Let c be free on u and d on the last of the fan. Along the path from u whose edges bear d, c, d, ... swap c and d:
   now d is free on u.
3. Some f_w has d free, and f_0 ... f_w is still a fan. Shift: each (u, f_k), k < w, takes the colour of (u, f_{k+1}),
   and (u, f_w) takes d.

Complexity: O(m n) time (a path has at most n nodes, a fan at most Delta), O(n Delta) space.

Differences from the paper
- MATCHA (Wang et al. 2019) takes the result of Misra and Gries: three matchings for a ring of eight. Here Delta colours
  are tried first, by Kempe's swap alone: if c is free on u and d on v, swap c and d along the path from v that starts
  with c; unless that path ends at u, c is now free on both. It never fails on bipartite graphs (Konig), such as even
  rings, and seldom on small graphs. A matching less saves an exchange in every round at budget 1. A failed try costs
  O(m n Delta^2).
"""

from __future__ import annotations

from hvd_hetero.topology.graphs import Edge, Graph


def matching_decomposition(graph: Graph) -> tuple[tuple[Edge, ...], ...]:
    """Return Delta or Delta + 1 matchings that hold each edge of ``graph`` exactly once."""
    degree = int(graph.degrees().max())
    coloring = _Coloring(graph.nodes, degree)
    if not all(coloring.add_by_swap(u, v) for u, v in graph.edges):
        coloring = _Coloring(graph.nodes, degree + 1)
        for u, v in graph.edges:
            coloring.add_by_fan(u, v)
    matchings: list[list[Edge]] = [[] for _ in range(coloring.colors)]
    for i, j in graph.edges:
        matchings[coloring.on[i][j]].append((i, j))
    return tuple(tuple(matching) for matching in matchings if matching)


class _Coloring:
    """A proper colouring of the edges added so far, as seen from each node.

    ``at[x]`` maps a colour to the neighbour at the other end of that edge; ``on[x]`` maps a neighbour to the colour.
    """

    def __init__(self, nodes: int, colors: int) -> None:
        self.colors = colors
        self.at: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.on: list[dict[int, int]] = [{} for _ in range(nodes)]

    def add_by_swap(self, u: int, v: int) -> bool:
        """Take Kempe's step; return False and change nothing if every path from v ends at u."""
        free_u, free_v = self._free(u), self._free(v)
        for c in free_u:
            if c in free_v:
                self._set(u, v, c)
                return True
        for c in free_u:
            for d in free_v:
                path = self._path(v, c, d)
                if path[-1][1] != u:
                    self._swap(path, c, d)
                    self._set(u, v, c)
                    return True
        return False

    def add_by_fan(self, u: int, v: int) -> None:
        """Take the step of Misra and Gries; needs a free colour on every node."""
        fan = self._fan(u, v)
        c, d = self._free(u)[0], self._free(fan[-1])[0]
        self._swap(self._path(u, d, c), c, d)
        width = next(w for w, f in enumerate(fan) if d not in self.at[f])
        shifted = [self.on[u][f] for f in fan[1 : width + 1]]
        for f in fan[1 : width + 1]:
            self._unset(u, f)
        for f, color in zip(fan, [*shifted, d], strict=False):
            self._set(u, f, color)

    def _free(self, x: int) -> list[int]:
        return [color for color in range(self.colors) if color not in self.at[x]]

    def _fan(self, u: int, v: int) -> list[int]:
        fan, left = [v], dict(self.on[u])
        while True:
            following = next((f for f, color in left.items() if color not in self.at[fan[-1]]), None)
            if following is None:
                return fan
            fan.append(following)
            del left[following]

    def _path(self, x: int, first: int, second: int) -> list[tuple[int, int, int]]:
        """Return the edges (x, y, colour) from x that bear first, second, first, ...; ``second`` is free on x."""
        path, color = [], first
        while color in self.at[x]:
            y = self.at[x][color]
            path.append((x, y, color))
            x, color = y, first + second - color
        return path

    def _swap(self, path: list[tuple[int, int, int]], c: int, d: int) -> None:
        for x, y, _ in path:
            self._unset(x, y)
        for x, y, color in path:
            self._set(x, y, c + d - color)

    def _set(self, x: int, y: int, color: int) -> None:
        self.at[x][color], self.at[y][color] = y, x
        self.on[x][y] = self.on[y][x] = color

    def _unset(self, x: int, y: int) -> None:
        color = self.on[x].pop(y)
        del self.on[y][x], self.at[x][color], self.at[y][color]
