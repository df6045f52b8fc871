"""The text of an operator call in an emitted program computes what the call computes: constants, lists and sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from autopar.ops import axis_rules
from autopar.ops.table import LOWERED
from tests.ops import emitted
from tests.ops.interpreter import Case, Layout, difference, make_case
from tests.ops.shards import Shards, deal
from tests.ops.test_rules import SAMPLES, is_allowed

_MESH: Any = SimpleNamespace(axes=(), device=torch.device("cpu"))


def _split_layout(case: Case) -> Layout | None:
    """The first rule that splits something on an axis of two; its slices are even."""
    rules = [rule for rule in axis_rules(case.graph, case.node) if any(type_.kind == "S" for type_ in rule.operands)]
    return next((layout for rule in rules if is_allowed(case, layout := Layout((rule,), (2,)))), None)


def _error(case: Case, layout: Layout) -> str | None:
    code = compile(emitted.call_text(case, layout), "emitted", "eval")
    operands = [deal(value, types, layout.sizes) for value, types in zip(case.operands, layout.operands, strict=True)]
    made: list[Shards] = [{} for _ in case.results]
    for coordinate in layout.coordinates:
        own = [shards[coordinate] for shards in operands]
        for shards, value in zip(made, emitted._call(code, own, _MESH), strict=True):
            shards[coordinate] = value
    pairs = zip(case.results, made, layout.results, strict=True)
    return next((e for whole, shards, types in pairs if (e := difference(case, whole, shards, types, layout))), None)


def test_emitted_calls_equal_the_whole() -> None:
    count = 0
    for sample in SAMPLES:
        case = make_case(*sample)
        layout = _split_layout(case) if sample.op not in LOWERED else None
        if layout is not None:
            count += 1
            assert _error(case, layout) is None, f"{sample}: {emitted.call_text(case, layout)}"
    assert count >= 380
