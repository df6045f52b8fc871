"""Planted bugs: the interpreter must refuse rules that are wrong in value, in shape, or only in the gradient."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.placement import I, P, R, S, Type
from autopar.ops.notation import AxisRule
from tests.ops.interpreter import check, make_case
from tests.ops.samples import Sample, close, exact, f, ids

torch.manual_seed(0)  # of samples that draw a 0 some wrong rules are right
WRONG: list[tuple[Sample, tuple[Type, ...], tuple[Type, ...]]] = [
    (close("gelu.default", f(4, 6)), (P,), (P,)),
    (close("softmax.int", f(4, 6), 1), (S(1),), (S(1),)),
    (exact("sum.dim_IntList", f(4, 6), [0]), (S(0),), (R,)),
    (exact("mm.default", f(4, 6), f(6, 2)), (P, P), (P,)),
    (exact("linear.default", f(4, 6), f(2, 6), f(2)), (S(1), S(1), R), (P,)),
    (exact("linear.default", f(4, 6), f(2, 6), f(2)), (P, R, R), (P,)),
    (exact("transpose.int", f(4, 6), 0, 1), (S(0),), (S(0),)),
    (exact("scatter_add.default", f(4, 6), 1, ids(6, 4, 2), f(4, 2)), (R, S(1), S(1)), (P,)),
    (exact("index_put.default", f(6, 4), [ids(6, 2)], f(2, 4), True), (R, S(0), S(0)), (P,)),
    (exact("index_fill.int_Scalar", f(4, 6), 1, ids(6, 2), 1.0), (P, R), (P,)),
    (exact("masked_fill.Scalar", f(4, 6), torch.ones(4, 6).bool(), 1.0), (P, R), (P,)),
    (exact("repeat.default", f(4, 6), [1, 2]), (S(1),), (S(1),)),
    (exact("histc.default", torch.arange(24.0).square().reshape(4, 6), 4), (S(0),), (P,)),
    (close("linalg_vector_norm.default", f(4, 6), 2, [1]), (S(1),), (P,)),
    (close("cumprod.default", f(4, 6), -1), (S(1),), (S(1),)),
    # right in value, wrong in the gradient
    (exact("index_put.default", f(6, 4), [ids(6, 2)], f(1), True), (S(1), R, I), (S(1),)),
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
