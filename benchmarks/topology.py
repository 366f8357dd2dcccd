"""Check MATCHA's promises: print them for known graphs, and test them on 300 random ones.

For every graph and budget: the matchings partition the edges and are at most max degree + 1; the expected communication
equals the budget; rho < 1; at budget 1 rho is no worse than D-PSGD's mixing matrix (Metropolis-Hastings) has; and in
the round of all matchings, as in ten drawn ones, the spectral norm of W is at most 1. rho is also measured: the mean of
W'W over drawn rounds.

Two more tables compare rules for the weights of a round: their rho, over all draws, and how soon they train.

    python benchmarks/topology.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parent / "papers"))
from _mixing_rules import LOSS, MOST_ROUNDS, SEEDS, compared, trained

from hvd_hetero.topology import Graph, Matcha, complete, from_edges, matcha, mixing_matrix, mixing_rho, ring

BUDGETS = (0.1, 0.5, 0.9, 1.0)
RANDOM = 300
ROUNDS = 10_000
TRAINED = ("alpha", "alpha <= 2/l_n", "a + 2b/x", "Metropolis", "here")


def barbell(clique: int, path: int) -> Graph:
    """Return two cliques joined by a path of further nodes."""
    first = itertools.combinations(range(clique), 2)
    middle = [(clique - 1 + i, clique + i) for i in range(path + 1)]
    last = itertools.combinations(range(clique + path, 2 * clique + path), 2)
    return from_edges([*first, *middle, *last])


def torus(rows: int, columns: int) -> Graph:
    """Return a grid whose opposite ends are joined."""
    at = [(r, c, columns * r + c) for r in range(rows) for c in range(columns)]
    right = [(node, columns * r + (c + 1) % columns) for r, c, node in at]
    down = [(node, columns * ((r + 1) % rows) + c) for r, c, node in at]
    return from_edges([*right, *down])


def random_graph(rng: np.random.Generator, most: int = 32) -> Graph:
    while True:
        nodes, density = int(rng.integers(2, most + 1)), rng.uniform(0.1, 1.0)
        graph = from_edges([(i, j) for i in range(nodes) for j in range(i) if rng.random() < density], nodes=nodes)
        if graph.is_connected():
            return graph


def known_graphs() -> dict[str, Graph]:
    rng = np.random.default_rng(8)
    grid = [(4 * r + c, 4 * r + c + 1) for r in range(4) for c in range(3)]
    grid += [(4 * r + c, 4 * r + c + 4) for r in range(3) for c in range(4)]
    return {
        "ring of 8": ring(8),
        "ring of 9": ring(9),
        "complete, 8": complete(8),
        "star of 9": from_edges([(0, i) for i in range(1, 9)]),
        "grid 4 x 4": from_edges(grid),
        "two cliques of 6": barbell(6, 0),
        "two cliques of 12, path": barbell(12, 5),
        "random, 16": random_graph(rng, 16),
        "ring of 256": ring(256),
        "complete, 64": complete(64),
    }


def graphs_to_compare() -> dict[str, Graph]:
    """Return graphs with at most 11 matchings."""
    known = known_graphs()
    some = ("ring of 8", "ring of 9", "complete, 8", "star of 9", "two cliques of 6", "random, 16")
    chords = [(i, (11 * i + 5) % 32) for i in range(0, 32, 3)]
    return {name: known[name] for name in some} | {
        "ring of 32 with chords": from_edges([*ring(32).edges, *chords]),
        "torus 3 x 3": torus(3, 3),
        "torus 3 x 5": torus(3, 5),
        "torus 8 x 8": torus(8, 8),
    }


def graphs_to_train() -> dict[str, tuple[Graph, float]]:
    """Return graphs with a budget each; the irregular one is the graph of ``papers/nonblocking_table1.py``."""
    known = known_graphs()
    pairs = [(0, 1), (0, 4), (1, 2), (1, 6), (2, 3), (2, 4), (3, 7), (4, 5), (4, 7), (5, 6), (6, 7)]
    return {
        "ring of 8": (known["ring of 8"], 0.5),
        "ring of 9": (known["ring of 9"], 0.9),
        "irregular, 8": (from_edges(pairs), 0.5),
        "complete, 8": (known["complete, 8"], 0.1),
        "star of 9": (known["star of 9"], 0.5),
        "two cliques of 6": (known["two cliques of 6"], 0.5),
        "torus 4 x 4": (torus(4, 4), 0.5),
    }


def broken(graph: Graph, m: Matcha, budget: float) -> list[str]:
    """Return the promises that this solution breaks."""
    spread = [edge for matching in m.matchings for edge in matching]
    ends = [[node for edge in matching for node in edge] for matching in m.matchings]
    whole = replace(m, probabilities=(1.0,) * len(m.matchings)).mixing(0, 0)
    promises = {
        "partition": sorted(spread) == list(graph.edges) and all(len(e) == len(set(e)) for e in ends),
        "number": len(m.matchings) <= graph.degrees().max() + 1,
        "budget": abs(sum(m.probabilities) / len(m.matchings) - budget) <= 1e-9,
        "range": all(0.0 <= p <= 1.0 for p in m.probabilities),
        "rho": m.rho < 1.0,
        "d-psgd": budget < 1.0 or m.rho <= mixing_rho(mixing_matrix(graph)) + 1e-9,
        "norm": max(np.linalg.norm(w, 2) for w in (whole, *(m.mixing(0, k) for k in range(10)))) <= 1.0 + 1e-12,
    }
    return [name for name, kept in promises.items() if not kept]


def drawn(m: Matcha, seed: int) -> tuple[float, float]:
    """Return the share of matchings used, and || mean of W'W - J ||, over drawn rounds."""
    used, second = 0.0, np.zeros((m.nodes, m.nodes))
    for k in range(ROUNDS):
        w = m.mixing(seed, k)
        used += m.active(seed, k).mean()
        second += w @ w
    return used / ROUNDS, float(np.linalg.norm(second / ROUNDS - 1 / m.nodes, 2))


def known() -> tuple[str, int]:
    lines = [
        "| graph | degree | matchings | budget | drawn | rho | drawn | D-PSGD's | CPU ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    bad = 0
    for name, graph in track(known_graphs().items(), "known graphs"):
        for budget in BUDGETS:
            start = process_time()
            m = matcha(graph, budget)
            took = process_time() - start
            bad += bool(broken(graph, m, budget))
            shown = [f"{value:.4f}" for value in drawn(m, seed=len(lines))] if graph.nodes <= 32 else ["", ""]
            lines.append(
                f"| {name} | {graph.degrees().max()} | {len(m.matchings)} | {budget} | {shown[0]} | {m.rho:.5f} "
                f"| {shown[1]} | {mixing_rho(mixing_matrix(graph)):.5f} "
                f"| {took * 1e3:.1f} |"
            )
    return "\n".join(lines), bad


def randoms() -> tuple[str, int]:
    rng = np.random.default_rng(0)
    bad, at_delta, times = 0, 0, []
    for _ in track(range(RANDOM), "random graphs"):
        graph = random_graph(rng)
        for budget in BUDGETS:
            start = process_time()
            m = matcha(graph, budget)
            times.append(process_time() - start)
            bad += bool(broken(graph, m, budget))
        at_delta += len(m.matchings) == graph.degrees().max()
    text = (
        f"{RANDOM} random connected graphs of 2 to 32 nodes x {len(BUDGETS)} budgets: {bad} broke a promise; "
        f"{at_delta} split into max degree matchings, the others into one more; "
        f"median {median(times) * 1e3:.1f} ms of processor time, most {max(times) * 1e3:.0f} ms."
    )
    return text, bad


def per_round() -> str:
    m = matcha(random_graph(np.random.default_rng(5)), 0.5)
    times = []
    for k in range(2000):
        start = process_time()
        m.pairs(1, k)
        times.append(process_time() - start)
    edges = sum(len(matching) for matching in m.matchings)
    return f"Drawing a round's pairs and their weights, of {edges} edges: median {median(times) * 1e6:.0f} µs."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the tables as benchmarks/results/topology.md")
    write = parser.parse_args().write
    table, bad = known()
    summary, worse = randoms()
    text = (
        f"{table}\n\nDrawn: over {ROUNDS:,} rounds, for up to 32 nodes (the norm of a mean over few rounds is a little "
        f"high).\n\n{summary} {per_round()}\n\n"
        "rho of rules for the weights of a round:\n\n"
        f"{compared(graphs_to_compare(), BUDGETS[:3])}\n\nx = d_i + d_j, partners of a pair's two ranks in the round; "
        "k matchings are drawn; l_n and l_t: the largest eigenvalue of the Laplacian of all edges, and of those drawn. "
        "Each rule has the parameters that make its rho least. alpha alone is the paper's, whose rounds may make "
        "disagreement larger. Metropolis: D-PSGD's weights on the drawn edges. Here: alpha 2 / (x + 2), alpha <= 1."
        f"\n\nRounds until the training loss of the mean model is {LOSS} (digits, a small network, {SEEDS} seeds; -: "
        f"some seed needs more than {MOST_ROUNDS}):\n\n{trained(graphs_to_train(), (0.3, 0.6, 1.0), TRAINED)}"
        f"\n\nEvery promise kept on every graph: {'NO' if bad + worse else 'yes'}."
    )
    print(text)
    if write:
        from _report import write_result

        write_result("topology", text)
    sys.exit(bool(bad + worse))


if __name__ == "__main__":
    main()
