"""Planted bugs: the interpreter must refuse rules that are wrong in value, in shape, or only in the gradient."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.placement import I, P, R, S, Type
from autopar.ops.notation import AxisRule
from tests.ops.interpreter import check, make_case
from tests.ops.samples import Sample, close, exact, f

WRONG: list[tuple[Sample, tuple[Type, ...], tuple[Type, ...]]] = [
    (close("gelu.default", f(4, 6)), (P,), (P,)),
    (close("softmax.int", f(4, 6), 1), (S(1),), (S(1),)),
    (exact("sum.dim_IntList", f(4, 6), [0]), (S(0),), (R,)),
    (exact("mm.default", f(4, 6), f(6, 2)), (P, P), (P,)),
    (exact("linear.default", f(4, 6), f(2, 6), f(2)), (S(1), S(1), R), (P,)),
    (exact("linear.default", f(4, 6), f(2, 6), f(2)), (P, R, R), (P,)),
    (exact("transpose.int", f(4, 6), 0, 1), (S(0),), (S(0),)),
    # right in value, wrong in the gradient
    (exact("mm.default", f(4, 6), f(6, 2)), (S(0), I), (S(0),)),
    (exact("mm.default", f(4, 6), f(6, 2)), (R, R), (I,)),
    (exact("mm.default", f(4, 6), f(6, 2)), (I, I), (R,)),
    (exact("add.Tensor", f(4, 6), f(4, 6)), (I, R), (R,)),
    (exact("add.Tensor", f(4, 6), f(4, 6)), (R, I), (I,)),
    (exact("alias.default", f(4, 6)), (R,), (I,)),
    (close("mean.default", f(4, 6)), (S(0),), (I,)),
    (exact("embedding.default", f(4, 6), torch.randint(0, 4, (3,))), (S(0), R), (R,)),
]


@pytest.mark.parametrize(("sample", "operands", "results"), WRONG, ids=str)
def test_wrong_rules_are_refused(sample: Sample, operands: tuple[Type, ...], results: tuple[Type, ...]) -> None:
    torch.manual_seed(0)
    assert check(make_case(*sample), (AxisRule(operands, results),), (2,)) is not None
