"""Rules adapted from DTensor's registry keep the same promise as the table's, or are excluded by name."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.ops import axis_rules, coverage, proofs, registry
from autopar.ops.call import Call, overload
from autopar.ops.table import find
from tests.ops.interpreter import check, make_case
from tests.ops.samples import Sample, registry_samples
from tests.ops.test_rules import layouts, text

SAMPLES = registry_samples()


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_registry_rules_run_locally_equal_the_whole(sample: Sample) -> None:
    assert find(sample.op) is None, "the table has its own rule"
    case = make_case(*sample)
    for layout in layouts(case):
        error = check(case, layout.rules, layout.sizes)
        assert error is None, f"{sample} on {layout.sizes} with {' × '.join(map(text, layout.rules))}: {error}"


def test_most_samples_have_rules() -> None:
    cases = [make_case(*sample) for sample in SAMPLES if sample.op not in proofs.FAILED]
    found = [case for case in cases if "registry" in coverage(case.graph).values()]
    assert len({case.node.op for case in found}) >= 14


def test_operators_that_failed_are_replicated_and_reported_with_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = "aten.diagonal_scatter.default([4, 6, 6], [4, 6], 0, 1, 2) on [2] with S(0), S(0) -> S(0): planted"
    monkeypatch.setattr(proofs, "FAILED", {"aten.diagonal_scatter.default": failure})
    case = make_case("aten.diagonal_scatter.default", (torch.ones(4, 6, 6), torch.ones(4, 6), 0, 1, 2), {})
    assert len(axis_rules(case.graph, case.node)) == 1
    assert coverage(case.graph) == {
        "aten.diagonal_scatter.default": f"replicated: its rules fail the property test: {failure}"
    }


def test_operators_that_no_sample_proves_are_replicated_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("aten.diagonal_scatter.default", (torch.ones(4, 6, 6), torch.ones(4, 6), 0, 1, 2), {})
    assert len(axis_rules(case.graph, case.node)) > 1
    monkeypatch.setattr(proofs, "PROVED", frozenset())
    case = make_case("aten.diagonal_scatter.default", (torch.ones(4, 6, 6), torch.ones(4, 6), 0, 1, 2), {})
    assert len(axis_rules(case.graph, case.node)) == 1
    assert coverage(case.graph) == {"aten.diagonal_scatter.default": "replicated: no sample proves its rules"}
    assert not registry.knows(overload(case.node.op))


def test_no_process_group_is_started() -> None:
    test_most_samples_have_rules()
    assert not torch.distributed.is_initialized()


def test_failures_of_the_registry_mean_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("aten.diagonal_scatter.default", (torch.ones(4, 6, 6), torch.ones(4, 6), 0, 1, 2), {})

    def fail(op: object) -> None:
        raise AttributeError("moved")

    monkeypatch.setattr(registry, "_strategies", fail)
    monkeypatch.setattr(registry, "_CACHE", {})
    assert registry.rules(Call(case.graph, case.node)) == ([], "DTensor's registry failed with AttributeError")
    assert not registry.knows(overload(case.node.op))


def test_repeated_calls_take_less_than_a_millisecond() -> None:
    calls = [Call(case.graph, case.node) for case in (make_case(*sample) for sample in SAMPLES)]
    for call in calls:
        registry.rules(call)
    begin = time.perf_counter()
    for call in calls:
        registry.rules(call)
    assert (time.perf_counter() - begin) / len(calls) < 1e-3
