"""Which ranks average with which: graphs, doubly stochastic mixing (D-PSGD), MATCHA's random matchings."""

from hvd_hetero.topology.edge_coloring import matching_decomposition
from hvd_hetero.topology.graphs import Graph, complete, from_edges, ring
from hvd_hetero.topology.matcha import Matcha, matcha
from hvd_hetero.topology.weights import metropolis_weights, mixing_matrix, mixing_rho

__all__ = [
    "Graph",
    "Matcha",
    "complete",
    "from_edges",
    "matcha",
    "matching_decomposition",
    "metropolis_weights",
    "mixing_matrix",
    "mixing_rho",
    "ring",
]
