"""The strategy-selection problem as pure data, in the format of Google's IOPDDL benchmark.

Choose one strategy for each node so that the sum of node and edge costs is least,

    Σ_i costs[i][choice[i]] + Σ_(i,j) edge_costs[i,j][choice[i], choice[j]],

and so that at each integer time t the usages of the nodes whose interval [lo, hi) holds t sum to at
most `usage_limit`. An entry of `INFINITE` forbids a strategy or a pair of strategies.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.errors import PlanError

INFINITE = 10**18
"""The cost that forbids; every entry at or above it means the same."""
NO_PATH_NS = 10**15
"""The price of a redistribution that does not exist: dearer than any plan, yet a sum of many is still a number."""

Int64Array = npt.NDArray[np.int64]
Interval = tuple[int, int]
Edge = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Problem:
    """One strategy-selection problem; checked, normalised and read-only once built.

    Arguments may be any sequences of integers. Edges that repeat, in either direction, are merged into
    one whose costs are the sums (no more than `INFINITE`); they keep the order and the direction of the
    first. Raises PlanError naming the node or edge that is malformed.
    """

    name: str
    intervals: Sequence[Interval]
    """[lo, hi) of each node, in integer times; lo ≥ hi uses no memory."""
    costs: Sequence[Int64Array]
    """Cost of each strategy of each node: |S_i| entries, ≥ 0."""
    usages: Sequence[Int64Array]
    """Memory of each strategy of each node while it is live: |S_i| entries, ≥ 0."""
    edges: Sequence[Edge]
    edge_costs: Sequence[Int64Array]
    """Cost of each pair of strategies: |S_i| × |S_j| entries, ≥ 0."""
    usage_limit: int | None = None
    """The most that may be live at one time; None means no limit."""

    def __post_init__(self) -> None:
        costs = tuple(_cost_vector(c, f"costs of node {i}") for i, c in enumerate(self.costs))
        usages = tuple(_integers(u, f"usages of node {i}") for i, u in enumerate(self.usages))
        intervals = tuple(_interval(i, interval) for i, interval in enumerate(self.intervals))
        _check_nodes(intervals, costs, usages)
        limit = None if self.usage_limit is None else int(self.usage_limit)
        edges, edge_costs = _merge_edges(costs, self.edges, self.edge_costs)
        normalised = (intervals, costs, usages, edges, edge_costs, limit)
        for field, value in zip(("intervals", "costs", "usages", "edges", "edge_costs", "usage_limit"),
                                normalised, strict=True):  # fmt: skip
            object.__setattr__(self, field, value)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.costs)


def load_problem(path: str | Path) -> Problem:
    """Reads a problem from a `.json` or `.json.gz` file; raises PlanError when it is malformed."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
        return _from_document(document)
    except (json.JSONDecodeError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: expected JSON of a strategy-selection problem, found {error}") from error
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path}: expected the fields of a strategy-selection problem; missing or of the "
                        f"wrong kind: {error}") from error  # fmt: skip
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _from_document(document: Any) -> Problem:
    body = document["problem"]
    nodes, edges = body["nodes"], body["edges"]
    sizes = [len(c) for c in nodes["costs"]]
    matrices = [_matrix(sizes, edge, flat) for edge, flat in _pairs(edges["nodes"], edges["costs"])]
    return Problem(body["name"], nodes["intervals"], nodes["costs"], nodes["usages"], edges["nodes"],
                   matrices, body.get("usage_limit"))  # fmt: skip


def _pairs(edges: Sequence[Any], edge_costs: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    if len(edges) != len(edge_costs):
        raise PlanError(f"expected one cost matrix an edge, found {len(edge_costs)} for {len(edges)} edges")
    return zip(edges, edge_costs, strict=True)


def _matrix(sizes: Sequence[int], edge: Any, flat: Any) -> Int64Array:
    """Row-major entries → |S_i| × |S_j| matrix."""
    i, j = _checked_edge(edge, len(sizes))
    entries = _cost_vector(flat, f"costs of edge ({i}, {j})")
    if entries.size != sizes[i] * sizes[j]:
        raise PlanError(f"costs of edge ({i}, {j}): expected {sizes[i]} × {sizes[j]} entries, "
                        f"found {entries.size}")  # fmt: skip
    return entries.reshape(sizes[i], sizes[j])


def _integers(values: Any, what: str) -> Int64Array:
    """Checks that values are integers ≥ 0 and returns them as a read-only int64 array."""
    array = np.asarray(values)
    if array.dtype == object or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(f"{what}: expected integers that fit in 64 bits, found {array.dtype} entries")
    if array.size and int(array.min()) < 0:
        raise PlanError(f"{what}: expected entries ≥ 0, found {int(array.min())}")
    result = array.astype(np.int64)
    result.flags.writeable = False
    return result


def _cost_vector(values: Any, what: str) -> Int64Array:
    array = _integers(values, what)
    if array.size and int(array.max()) > INFINITE:
        array = np.minimum(array, INFINITE)
        array.flags.writeable = False
    return array


def _interval(node: int, interval: Any) -> Interval:
    try:
        lo, hi = interval
        return int(lo), int(hi)
    except (TypeError, ValueError) as error:
        raise PlanError(f"interval of node {node}: expected two integers [lo, hi), found {interval!r}") from error


def _check_nodes(intervals: Sequence[Any], costs: Sequence[Int64Array], usages: Sequence[Int64Array]) -> None:
    if not len(intervals) == len(costs) == len(usages):
        raise PlanError(f"expected an interval, costs and usages for each node, found {len(intervals)} "
                        f"intervals, {len(costs)} costs and {len(usages)} usages")  # fmt: skip
    for i, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        if cost.ndim != 1 or cost.size == 0:
            raise PlanError(f"costs of node {i}: expected one entry a strategy, at least one, "
                            f"found shape {cost.shape}")  # fmt: skip
        if usage.shape != cost.shape:
            raise PlanError(f"usages of node {i}: expected {cost.size} entries, one a strategy, "
                            f"found shape {usage.shape}")  # fmt: skip


def _checked_edge(edge: Any, num_nodes: int) -> Edge:
    try:
        i, j = (int(end) for end in edge)
    except (TypeError, ValueError) as error:
        raise PlanError(f"edge {edge!r}: expected two node numbers") from error
    if not (0 <= i < num_nodes and 0 <= j < num_nodes):
        raise PlanError(f"edge ({i}, {j}): expected nodes between 0 and {num_nodes - 1}")
    if i == j:
        raise PlanError(f"edge ({i}, {j}): expected two different nodes; add its diagonal to the node's costs")
    return i, j


def _merge_edges(
    costs: Sequence[Int64Array], edges: Sequence[Any], edge_costs: Sequence[Any]
) -> tuple[tuple[Edge, ...], tuple[Int64Array, ...]]:
    merged: dict[Edge, Int64Array] = {}
    for edge, entries in _pairs(edges, edge_costs):
        i, j = _checked_edge(edge, len(costs))
        matrix = _cost_vector(entries, f"costs of edge ({i}, {j})")
        if matrix.shape != (costs[i].size, costs[j].size):
            raise PlanError(f"costs of edge ({i}, {j}): expected shape ({costs[i].size}, {costs[j].size}), "
                            f"found {matrix.shape}")  # fmt: skip
        key, addend = ((j, i), matrix.T) if (j, i) in merged else ((i, j), matrix)
        merged[key] = _add_saturating(merged[key], addend) if key in merged else addend
    return tuple(merged), tuple(merged.values())


def _add_saturating(left: Int64Array, right: Int64Array) -> Int64Array:
    """Sums costs, at most INFINITE: two terms of at most 10^18 each fit in 64 bits."""
    total: Int64Array = np.minimum(left + right, INFINITE)
    total.flags.writeable = False
    return total
