"""Hooks on gradients run in the program as operators, or the plan is refused; checkpointing is a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError, TraceError
from autopar.trace import trace
from tests.carried.compared import differences, planned
from tests.carried.hooked import HOOKED, Checkpointed, CheckpointedInputs
from tests.carried.models import WIDTH, Net, batch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(3)
    yield


CASES = [
    *((kind, {"dp": 2}) for kind in HOOKED),
    *((kind, {"tp": 2}) for kind in ("scaled", "mixes elements", "clipped parameters")),
    *((kind, {"dp": 2, "zero": 3}) for kind in ("masked parameter", "clipped parameters", "tied")),
    *((kind, {"dp": 2, "microbatches": 2}) for kind in ("scaled", "masked parameter", "module")),
    *((kind, {"devices": 2}) for kind in ("two in order", "blocks", "tied")),
]


@pytest.mark.sampled(always=("scaled-{'dp': 2}",))
@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
def test_program_equals_the_model(kind: str, how: dict[str, Any]) -> None:
    assert differences(HOOKED[kind](), batch(), **how) == []


def test_hook_is_written_as_what_it_does() -> None:
    source = planned(HOOKED["scaled"](), batch(), dp=2).source
    assert "rt.hooked(mul, lambda gradient: aten.mul.Tensor(gradient, 0.5))" in source


def test_hook_that_is_not_linear_takes_no_summands_of_microbatches() -> None:
    with pytest.raises(PlanError, match=r"(?s)gradient_hook.*Use\s+microbatches=1"):
        planned(HOOKED["tied"](), batch(), dp=2, microbatches=2)


def test_blocks_with_equal_hooks_are_exported_once() -> None:
    graph = trace(HOOKED["blocks"](), batch())
    assert [node.op for node in graph.nodes].count("autopar.gradient_hook.default") == 5


def test_gradients_are_nothing_to_inference() -> None:
    graph = trace(HOOKED["module"](), batch(), mode="inference")
    assert not any("hook" in node.op for node in graph.nodes)


def _on_activation(hook: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def part(net: Net, h: Tensor) -> Tensor:
        h.register_hook(hook)
        return h

    return lambda: Net(part)


def _after_storing() -> nn.Module:
    net = Net(lambda net, h: h)
    net.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return net


def _old_kind() -> nn.Module:
    net = Net(lambda net, h: net.gate(h))
    net.gate.register_backward_hook(lambda module, inputs, outputs: None)
    return net


def _reads_outputs() -> nn.Module:
    net = Net(lambda net, h: net.gate(h))
    net.gate.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] + outputs[0],))
    return net


def _packs(net: Net, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        return h.sin()


def _on_written(net: Net, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda gradient: gradient * 2)
    return h.mul_(2)


def _off(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.register_hook(lambda gradient: gradient * 2)
        return h + h.detach() * 2


SEEN: list[Tensor] = []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_on_activation(lambda gradient: SEEN.append(gradient)), r"looks on.*full_gradients"),
        (_on_activation(lambda gradient: gradient if gradient.sum() > 0 else -gradient), "what no graph can hold"),
        (_on_activation(lambda gradient: gradient + torch.randn_like(gradient)), "draws random numbers"),
        (_after_storing, r"on parameter up\.weight, which runs after a gradient is stored"),
        (_old_kind, r"on module gate, which is of the old kind\. Use register_full_backward_hook"),
        (_reads_outputs, "reads the gradient of the module's output"),
        (lambda: Net(_on_written), "is of a tensor that is written to"),
        (lambda: Net(_packs), r"saved_tensors_hooks at\n.*test_hooks\.py:\d+: with torch"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_its_place(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=r"test_hooks\.py:\d+(?s:.*)|saved_tensors_hooks") as error:
        planned(make(), batch(), dp=2)
    assert error.match(message)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", [{"dp": 2}, {"devices": 2}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_a_hint(reentrant: bool, how: dict[str, Any]) -> None:
    model = CheckpointedInputs() if "devices" in how else Checkpointed(use_reentrant=reentrant)
    assert differences(model, batch(), **how) == []


def test_reentrant_checkpoint_of_inputs_alone_has_no_gradients_inside() -> None:
    graph = trace(CheckpointedInputs(), batch())
    trained = [name for name in ("first.weight", "last.weight") for n in graph.nodes if name in n.operands]
    assert trained == ["first.weight", "last.weight"]
    (first,) = (node for node in graph.nodes if "first.weight" in node.operands)
    assert first.op == "aten.detach.default", f"of width {WIDTH}"
