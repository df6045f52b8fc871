"""A row of the table is all that the compiler knows of an operator."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from autopar.ir.branches import MEAN_LOSSES
from autopar.ir.placement import Axis, R, S
from autopar.ops.call import Call, base_name
from autopar.ops.table import OPERATORS, operator
from tests.ops.interpreter import make_case

ROOT = Path(__file__).parents[2]
#: what is emitted, read, rewritten, measured, and written down instead of traced
NAMING = ("ops", "runtime", "ir", "trace", "substitute", "profiler", "auditing")


def test_no_room_that_prices_plays_or_writes_names_an_operator() -> None:
    compiler = ROOT / "autopar"
    files = [path for path in compiler.rglob("*.py") if path.relative_to(compiler).parts[0] not in NAMING]
    named = [
        f"{path.name}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPERATORS
        if "." in node.value
    ]
    assert len(files) > 100 and named == []


def test_losses_that_count_their_samples_are_known_where_branches_are_checked() -> None:
    """`ir` knows of no table: a branch runs on some ranks alone, which cannot count with all."""
    assert {op for op, row in OPERATORS.items() if row.counts_samples is not None} == set(MEAN_LOSSES)


def test_other_overloads_have_the_work_and_memory_of_an_operator_and_not_its_rule() -> None:
    known, other = operator("aten.max.dim"), operator("aten.max.other")
    assert known.rule is not None and other.rule is None
    assert (other.work, other.saved) == (known.work, known.saved)
    assert operator("mylib.unheard.of").work.family == "pointwise"


def test_batch_statistics_mix_samples_in_training_alone() -> None:
    found = {}
    for training in (True, False):
        given = (torch.rand(4, 6), None, None, torch.zeros(6), torch.ones(6), training, 0.1, 1e-5)
        case = make_case("aten._native_batch_norm_legit_functional.default", given, {})
        inside = operator(case.node.op).inside
        assert inside is not None
        found[training] = any(inside(Call(case.graph, case.node), ((S(0),), (R,), (R,)), (Axis("microbatch", 2, 1),)))
    assert found == {True: True, False: False}


def test_rows_of_one_name_agree_on_what_holds_for_other_overloads() -> None:
    kept: dict[str, object] = {}
    for op, row in OPERATORS.items():
        facts = (row.work, row.saved, row.saved_on_cpu, row.workspace, row.is_view, row.passes, row.creates)
        assert kept.setdefault(base_name(op), facts) == facts, op
