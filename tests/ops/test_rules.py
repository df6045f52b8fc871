"""The core promise: every rule of every operator, run on shards and joined, equals the whole; gradients too."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.ir.placement import is_even
from autopar.ir.structure import HOOK
from autopar.ops import admits, axis_rules
from autopar.ops.notation import AxisRule
from autopar.ops.table import RULES
from tests.ops.interpreter import Case, Layout, check, make_case
from tests.ops.long_tail_samples import long_tail
from tests.ops.samples import Sample, table_samples

SAMPLES = [*table_samples(), *long_tail()]
MAX_PAIRS = 24


def layouts(case: Case, max_pairs: int = MAX_PAIRS) -> list[Layout]:
    """Every rule on one axis of 2 and of 3, and pairs of rules on two axes: all, or a fixed random choice."""
    rules = axis_rules(case.graph, case.node)
    single = [Layout((rule,), (size,)) for size in (2, 3) for rule in rules]
    pairs = [Layout(pair, (2, 2)) for pair in itertools.product(rules, repeat=2)]
    allowed = [layout for layout in pairs if is_allowed(case, layout)]
    chosen = random.Random(0).sample(allowed, min(max_pairs, len(allowed)))
    return [layout for layout in single if is_allowed(case, layout)] + chosen


def is_allowed(case: Case, layout: Layout) -> bool:
    return splits_evenly(case, layout) and admitted(case, layout)


def splits_evenly(case: Case, layout: Layout) -> bool:
    names = (*case.node.operands, *case.node.results)
    types = (*layout.operands, *layout.results)
    return all(is_even(case.graph.tensors[n].shape, t, layout.axes) for n, t in zip(names, types, strict=True))


def admitted(case: Case, layout: Layout) -> bool:
    return admits(case.graph, case.node, layout.operands, layout.results, layout.axes) is None


def uneven_layouts(case: Case) -> list[Layout]:
    """Where slices differ in length, or are empty: one axis, and a fixed random choice of pairs."""
    rules = axis_rules(case.graph, case.node)
    single = [Layout((rule,), (size,)) for size in (3, 5) for rule in rules]
    pairs = [Layout(pair, (2, 3)) for pair in itertools.product(rules, repeat=2)]
    chosen = random.Random(0).sample(pairs, min(MAX_PAIRS // 2, len(pairs)))
    return [layout for layout in single + chosen if not splits_evenly(case, layout) and admitted(case, layout)]


def text(rule: AxisRule) -> str:
    return f"{', '.join(map(str, rule.operands))} -> {', '.join(map(str, rule.results))}"


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rules_run_locally_equal_the_whole(sample: Sample) -> None:
    case = make_case(*sample)
    for layout in layouts(case):
        error = check(case, layout.rules, layout.sizes)
        rules = " × ".join(map(text, layout.rules))
        assert error is None, f"{sample} on {layout.sizes} with {rules}: {error}"


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rules_hold_for_uneven_slices(sample: Sample) -> None:
    case = make_case(*sample)
    for layout in uneven_layouts(case):
        error = check(case, layout.rules, layout.sizes)
        rules = " × ".join(map(text, layout.rules))
        assert error is None, f"{sample} on {layout.sizes} with {rules}: {error}"


def test_every_entry_of_the_table_has_a_sample() -> None:
    """But for hooks of gradients, which are text of a program: tests/carried/test_hooks.py runs them in plans."""
    assert set(RULES) - {HOOK} <= {sample.op for sample in SAMPLES}


def test_how_much_is_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts what the tests above ran, so that a rule lost from the table is seen."""
    cases = [make_case(*sample) for sample in SAMPLES]
    rules = sum(len(axis_rules(case.graph, case.node)) for case in cases)
    operators = len({case.node.op for case in cases})
    with capsys.disabled():
        print(f"\n{operators} operators, {len(cases)} calls, {rules} rules on one axis")
    assert operators >= 180 and rules >= 1600
