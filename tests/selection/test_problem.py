"""The problem: the public format loads unchanged, and what is malformed is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.selection.evaluator import evaluate
from autopar.selection.problem import INFINITE, Problem, load_problem

PUBLIC = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[0, 0], [2, 4], [3, 5]],
            "costs": [[15], [55, 65], [25, 45, 1000000000000000000]],
            "usages": [[10], [25, 25], [15, 20, 15]],
        },
        "edges": {
            "nodes": [[0, 1], [1, 2], [2, 1]],
            "costs": [[30, 40], [50, 10, 40, 90, 80, 0], [1, 2, 3, 4, 5, 6]],
        },
        "usage_limit": 50,
    }
}


@pytest.fixture(params=[".json", ".json.gz"])
def public_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"example{request.param}"
    text = json.dumps(PUBLIC).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_public_format_loads_with_repeated_edges_summed(public_file: Path) -> None:
    problem = load_problem(public_file)
    assert problem.edges == ((0, 1), (1, 2))
    assert problem.edge_costs[1].tolist() == [[51, 13, 45], [92, 84, 6]]
    assert (problem.num_nodes, problem.usage_limit, problem.intervals[0]) == (3, 50, (0, 0))


def test_evaluator_counts_costs_and_the_peak_of_live_nodes(public_file: Path) -> None:
    problem = load_problem(public_file)
    found = evaluate(problem, (0, 1, 1))
    assert (found.cost, found.peak_usage) == (15 + 65 + 45 + 40 + 84, 45)
    assert found.feasible
    assert not evaluate(problem, (0, 0, 2)).feasible, "a forbidden strategy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": [(0, 0)], "edge_costs": [[[1]]]}, r"edge \(0, 0\): expected two different nodes"),
        ({"edges": [(0, 3)], "edge_costs": [[[1]]]}, r"edge \(0, 3\): expected nodes between 0 and 1"),
        ({"edges": [(0, 1)], "edge_costs": [[[1, 2]]]}, r"edge \(0, 1\): expected shape \(1, 1\)"),
        ({"usages": [[1], [2, 3]]}, "usages of node 1: expected 1 entries"),
        ({"costs": [[1], [-1]]}, "costs of node 1: expected entries ≥ 0"),
    ],
)
def test_malformed_problems_name_the_place(change: dict[str, object], message: str) -> None:
    fields = {"intervals": [(0, 1)] * 2, "costs": [[1], [1]], "usages": [[1], [1]], "edges": [], "edge_costs": []}
    with pytest.raises(PlanError, match=message):
        Problem("bad", **{**fields, **change})  # type: ignore[arg-type]


def test_costs_saturate_at_infinite() -> None:
    problem = Problem("p", [(0, 1)] * 2, [[INFINITE], [INFINITE]], [[0], [0]], [(0, 1)], [[[INFINITE]]])
    assert evaluate(problem, (0, 0)).cost == INFINITE
