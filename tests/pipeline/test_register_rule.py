"""Users add rules for their own operators: such an operator is split then, and the program still equals the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import autopar
from autopar.errors import RuleError
from autopar.ops import lookup
from tests.pipeline.jobs import Custom, gradients
from tests.rank_pool import pool

OP = "autopar_test.scaled_product.default"
RULE = "b s d, d h -> b s h"


@pytest.fixture(autouse=True)
def _forget_rules() -> Iterator[None]:
    yield
    lookup._USER.pop(OP, None)


def model_and_batch() -> tuple[Custom, torch.Tensor]:
    torch.manual_seed(0)
    return Custom(), torch.randn(4, 6, 16)


@pytest.mark.ranks
def test_operator_with_a_registered_rule_is_split_and_equals_the_model() -> None:
    autopar.register_rule(OP, RULE, partial="PR")
    model, x = model_and_batch()
    mesh = autopar.Mesh("h100", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, (x,), tp=2)
    assert plan.coverage[OP] == "user"
    program = autopar.parallelize(model, mesh, (x,), plan=plan)
    loss, found, shapes = pool(2).run(gradients, program.source, dict(model.state_dict()), x)[0]
    assert shapes == {"up": (16, 16), "down": (16, 16)}, "a column split, then a row split, of 16 × 32 and 32 × 16"
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_program_imports_what_defines_its_operators() -> None:
    """Under torchrun nothing else would: the operator's name exists once its module has been imported."""
    model, x = model_and_batch()
    source = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=1), (x,)).source
    assert "import tests.pipeline.jobs  # defines autopar_test.scaled_product\n" in source


def test_without_its_rule_the_operator_is_replicated_and_reported() -> None:
    model, x = model_and_batch()
    plan = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=2), (x,)).plan
    assert plan.coverage[OP].startswith("replicated: no rule")


@pytest.mark.parametrize(
    ("op", "rule", "partial", "message"),
    [
        (OP, "b s d, d h", "", r"expected a rule such as \"b m k, k n -> b m n\", found 'b s d, d h'"),
        (OP, "b s d, d 4 -> b s 4", "", r"expected dims as letters or \.\.\., found '4' in rule"),
        (OP, "b s d, d h, h -> b s h", "", "expected at most 2 operands in the rule for .*found 3"),
        (OP, "b s d, d h -> b s h, h", "", "expected at most 1 results in the rule for .*found 2"),
        (OP, RULE, "PX", "expected partial words of 2 letters P or R, one an operand, found 'PX'"),
        (OP, RULE, "P", "expected partial words of 2 letters P or R, one an operand, found 'P'"),
        ("autopar_test.absent.default", RULE, "", "found 'autopar_test.absent.default'; import the module"),
        ("scaled_product", RULE, "", "expected an operator such as .*found 'scaled_product'"),
    ],
)
def test_malformed_rules_are_refused_at_once(op: str, rule: str, partial: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        autopar.register_rule(op, rule, partial)
    assert OP not in lookup._USER


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b d, d h -> b h", r"expected 2 dims for 'b d', found shape \(4, 6, 16\) in operand 0"),
        ("b s d, h d -> b s h", r"expected one length for 'd' .*found 16 in operand 0 .* and 32 in operand 1"),
        ("b s d, d h -> s b h", r"expected one length for 's' .*found 6 in operand 0 .* and 4 in result 0"),
        ("b s d -> b s h", "expected 2 operands in the rule 'b s d -> b s h', found 1"),
    ],
)
def test_rule_that_contradicts_the_shapes_is_refused_with_the_line(rule: str, message: str) -> None:
    autopar.register_rule(OP, rule)
    model, x = model_and_batch()
    place = (
        r"the rule registered for autopar_test\.scaled_product\.default does not fit node \w+ at pipeline/jobs\.py:\d+"
    )
    with pytest.raises(RuleError, match=f"{place}: {message}.*; correct the text given to autopar.register_rule"):
        autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=2), (x,))
