"""What is taken by name only: said in the call, stated in the plan, and nothing of it where it was not said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.errors import PlanError
from models import mlp

MESH = autopar.Mesh("h100", devices_per_node=2)
FEW = autopar.SearchBudget(seconds=2.0, proposals=0, substitutions=False, stages=False)


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = mlp.Config()
    return mlp.build(config), mlp.example_inputs(config)


def test_a_plan_states_what_was_allowed() -> None:
    """In its file, in print, and read again; a plan for which nothing was allowed says nothing of it."""
    allowed, plain = (
        autopar.parallelize(*_given(), search=FEW, check=False, **more).plan
        for more in ({"allow": ("offload",)}, {})
    )  # fmt: skip
    assert (allowed.allow, plain.allow) == (("offload",), ())
    assert autopar.Plan.from_json(allowed.to_json()) == allowed
    assert "  allowed     offload\n" in str(allowed)
    assert '"allow":' not in plain.to_json() and "allowed" not in str(plain)


@pytest.mark.parametrize("allow", ["offload", ("offlaod",), 3, [None], ("int8",)])
def test_an_option_that_there_is_not_is_refused_before_the_model_is_traced(allow: Any) -> None:
    """A name that is misspelt, or text for a list of names."""
    with pytest.raises(PlanError, match="expected allow as a sequence of names out of offload"):
        autopar.parallelize(*_given(), allow=allow)


def test_a_template_says_what_is_offloaded_by_a_word() -> None:
    """Another word is refused, and so is any for inference, which trains nothing."""
    with pytest.raises(PlanError, match="expected offload as one of none, optimizer, activations, both, found 'disk'"):
        autopar.template_plan(*_given(), dp=2, offload="disk")
    with pytest.raises(PlanError, match='expected mode="train" with offload='):
        autopar.template_plan(*_given(), dp=2, offload="optimizer", mode="inference")
    assert autopar.template_plan(*_given(), dp=2, offload="none", check=False).allow == ()


def test_the_command_line_takes_it_and_not_beside_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    """A template names what it offloads by itself."""
    given = ["plan", "models.mlp:Config", "--mesh", "h100:2", "--search", "fast", "--allow", "offload"]
    assert main([*given, "--template", "dp=2"]) == 2
    assert "expected --template or --allow" in capsys.readouterr().err
    assert main(given) == 0
    assert "allowed     offload" in capsys.readouterr().out


def _given() -> tuple[nn.Module, autopar.Mesh, dict[str, torch.Tensor]]:
    model, batch = model_and_batch()
    return model, MESH, batch
