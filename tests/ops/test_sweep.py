"""The record of what torch's samples prove: a fixed part of it made anew, and what it is used for."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from autopar.ir.placement import P, R, S
from autopar.ops import axis_rules, has_rules, overload, proofs, registry
from autopar.ops.notation import AxisRule
from autopar.ops.table import LOWERED, RULES, find
from tests.ops.interpreter import make_case
from tests.ops.samples import Sample, close, exact, f
from tests.ops.sweep import Calls, everything_trusted, is_candidate, prove, summary
from tests.ops.torch_samples import torch_samples

NUM_INFOS, MAX_CALLS, MAX_PAIRS = 50, 2, 4


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch's samples use what torch deprecates
def test_a_fixed_part_of_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with everything_trusted():
        samples = torch_samples(cache(is_candidate), NUM_INFOS)
        torch.manual_seed(0)
        calls = {op: Calls(calls[:MAX_CALLS], []) for op, calls in samples.items() if op not in LOWERED}
        found = {op: prove(samples, MAX_PAIRS) for op, samples in calls.items()}
    with capsys.disabled():
        print(f"\n{summary(found)}")
    failures = {op: proof.failure for op, proof in found.items() if proof.failure and op not in proofs.FAILED}
    assert failures == {}
    held = {op for op, proof in found.items() if proof.holds}
    assert len(held) >= 75
    assert held <= {*proofs.PROVED, *proofs.FAILED}, "python -m tests.ops.sweep makes the record anew"
    need = {op for op, proof in found.items() if proof.holds and proof.needs_elements}
    assert need <= {*proofs.NEED_ELEMENTS, *proofs.FAILED}


def test_how_much_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(proofs.PATH.read_text())
    known = {str(op) for op in registry.overloads() if not op._schema.is_mutable}
    trusted = [op for op in known if op in proofs.PROVED]
    with capsys.disabled():
        print(f"\n{len(record['proved'])} operators proved, {len(record['failed'])} failed")
        print(f"{len(trusted)} of the {len(known)} in DTensor's registry that write to nothing are trusted")
    assert len(record["proved"]) >= 350 and len(trusted) >= 250
    assert all(overload(op) for op in (*record["proved"], *record["need_elements"], *record["failed"]))
    assert not set(record["failed"]) & set(RULES)


def test_what_writes_to_its_operands_has_no_rules() -> None:
    writing = [op for op in registry.overloads() if op._schema.is_mutable and str(op) not in RULES]
    assert len(writing) > 300
    assert [str(op) for op in writing if has_rules(op)] == ["aten.eye.m_out"]  # which makes a tensor


def test_values_that_a_new_tensor_is_made_of_are_no_summands() -> None:
    """The sweep found linspace(start) of a start in summands taken for equal on all ranks."""
    case = make_case("aten.linspace.Tensor_Scalar", (f().detach(), 1.0, 3), {})
    assert {rule.operands for rule in axis_rules(case.graph, case.node)} == {(R,)}


def test_torchs_tag_alone_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("aten.erfinv.default") is not None
    monkeypatch.setattr(proofs, "PROVED", frozenset())
    assert find("aten.erfinv.default") is None


WRONG = [
    (exact("diagonal_copy.default", f(4, 6, 6), 0, 1, 2), AxisRule((S(1),), (S(1),))),
    (exact("diagonal_copy.default", f(4, 6, 6), 0, 1, 2), AxisRule((S(0),), (P,))),
    (close("diagonal_scatter.default", f(4, 6, 6), f(4, 6), 0, 1, 2), AxisRule((P, S(0)), (P,))),
]


@pytest.mark.parametrize(("sample", "rule"), WRONG, ids=str)
def test_wrong_rules_of_the_registry_are_found(sample: Sample, rule: AxisRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "rules", lambda call: ([rule], ""))
    assert prove(Calls([], [sample])).failure
