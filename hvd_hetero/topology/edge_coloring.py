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
  with c. Unless that path ends at u, c is now free on both.
"""

from __future__ import annotations

from itertools import product

from hvd_hetero.topology.graphs import Edge, Graph

Coloring = list[dict[int, int]]
"""For each node, the other ends of its coloured edges by their colours."""


def matching_decomposition(graph: Graph) -> tuple[tuple[Edge, ...], ...]:
    """Return Delta or Delta + 1 matchings that hold each edge of ``graph`` exactly once."""
    degree = int(graph.degrees().max())
    at: Coloring = [{} for _ in range(graph.nodes)]
    # It never fails on bipartite graphs (Konig), such as even rings, and seldom on small graphs. A matching less saves
    # an exchange in every round at budget 1; a failed try costs O(m n Delta^2).
    if not all(_color_by_swap(at, u, v, degree) for u, v in graph.edges):
        at = [{} for _ in range(graph.nodes)]
        for u, v in graph.edges:
            _color_by_fan(at, u, v, degree + 1)
    matchings: list[list[Edge]] = [[] for _ in range(degree + 1)]
    for i, j in graph.edges:
        matchings[_colors(at, i)[j]].append((i, j))
    return tuple(tuple(matching) for matching in matchings if matching)


def _color_by_swap(at: Coloring, u: int, v: int, colors: int) -> bool:
    """Take Kempe's step; return False and change nothing if every path from v ends at u."""
    free_u, free_v = _free(at, u, colors), _free(at, v, colors)
    for c in free_u:
        if c in free_v:
            _set(at, u, v, c)
            return True
    for c, d in product(free_u, free_v):
        path = _path(at, v, c, d)
        if path[-1][1] != u:
            _swap(at, path, c, d)
            _set(at, u, v, c)
            return True
    return False


def _color_by_fan(at: Coloring, u: int, v: int, colors: int) -> None:
    """Take the step of Misra and Gries; needs a free colour on every node."""
    fan, left = [v], _colors(at, u)
    while (following := next((f for f, color in left.items() if color not in at[fan[-1]]), None)) is not None:
        fan.append(following)
        del left[following]
    c, d = _free(at, u, colors)[0], _free(at, fan[-1], colors)[0]
    _swap(at, _path(at, u, d, c), c, d)
    width = next(w for w, f in enumerate(fan) if d not in at[f])
    of = _colors(at, u)
    shifted = [of[f] for f in fan[1 : width + 1]]
    for f, color in zip(fan[1:], shifted, strict=False):
        del at[u][color], at[f][color]
    for f, color in zip(fan, [*shifted, d], strict=False):
        _set(at, u, f, color)


def _colors(at: Coloring, x: int) -> dict[int, int]:
    return {y: color for color, y in at[x].items()}


def _free(at: Coloring, x: int, colors: int) -> list[int]:
    return [color for color in range(colors) if color not in at[x]]


def _path(at: Coloring, x: int, first: int, second: int) -> list[tuple[int, int, int]]:
    """Return the edges (x, y, colour) from x that bear first, second, first, ...; ``second`` is free on x."""
    path, color = [], first
    while color in at[x]:
        path.append((x, at[x][color], color))
        x, color = at[x][color], first + second - color
    return path


def _swap(at: Coloring, path: list[tuple[int, int, int]], c: int, d: int) -> None:
    for x, y, color in path:
        del at[x][color], at[y][color]
    for x, y, color in path:
        _set(at, x, y, c + d - color)


def _set(at: Coloring, x: int, y: int, color: int) -> None:
    at[x][color], at[y][color] = y, x
