"""Blocks that do the same are exported once, and the graph is the one that exporting all of them gives.

Each model here is traced both ways, and the graphs are equal: nodes, names, modules, source lines, what is stored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import Graph
from autopar.trace import trace
from autopar.trace.decompose import decompose
from autopar.trace.markers import repeated
from autopar.trace.repeats import Repeats
from tests.equivalence import zoo

pytestmark = pytest.mark.sweep

_NEVER = 10**9


def traced_twice(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: Any, **options: Any
) -> tuple[Graph, list[str]]:
    """The graph, after it was seen to be the same either way, and the blocks that were not exported for it."""
    made = []

    class Noted(Repeats):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(importlib.import_module("autopar.trace.export"), "Repeats", Noted)
    whole = trace(model, inputs, fewest=_NEVER, **options)
    short = trace(model, inputs, fewest=2, **options)
    assert made[0].watched == []
    assert short.nodes == whole.nodes
    assert short == whole
    assert short.fingerprint == whole.fingerprint
    assert {name: value.tolist() for name, value in short.values.items()} == {
        name: value.tolist() for name, value in whole.values.items()
    }
    return short, made[1].watched


class Block(nn.Module):
    """A block that a test changes: what it computes, and what it is set to."""

    def __init__(self, index: int, function: Callable[[Block, Tensor], Any]) -> None:
        super().__init__()
        self.index, self.function = index, function
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)


class Stack(nn.Module):
    """Four blocks, and how they are called."""

    def __init__(self, function: Callable[..., Any], call: Callable[[Stack, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(index, function) for index in range(4)])
        self.call = call or in_a_row

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.first(x)).square().mean()


def in_a_row(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def plain(block: Block, x: Tensor) -> Tensor:
    return x + block.norm(F.gelu(block.linear(x)))


# Blocks that do the same, wired in any way ----------------------------------------


def _all_states(model: Stack, x: Tensor) -> Tensor:
    states = [x]
    for block in model.blocks:
        states.append(block(states[-1]))
    return torch.stack(states).softmax(0).sum(0)


def _skips(model: Stack, x: Tensor) -> Tensor:
    a = model.blocks[0](x)
    b = model.blocks[1](a)
    c = model.blocks[2](b) * 2.0 + a
    return model.blocks[3](c) + b + x


def _written_after(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
        x += 1.0
    return x


def _twice(model: Stack, x: Tensor) -> Tensor:
    return in_a_row(model, in_a_row(model, x))


def _without_gradient(model: Stack, x: Tensor) -> Tensor:
    with torch.no_grad():
        frozen = in_a_row(model, x)
    return in_a_row(model, x) - frozen


def _pairs(block: Block, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    given, kept = (x, x) if isinstance(x, Tensor) else x
    return plain(block, given), kept


def _first_of_pairs(model: Stack, x: Tensor) -> Tensor:
    pair = (x, x * 2.0)
    for block in model.blocks:
        pair = block(pair)
    return pair[0] * pair[1]


def _constant(block: Block, x: Tensor) -> Tensor:
    return plain(block, x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _dropped(block: Block, x: Tensor) -> Tensor:
    unused = block.linear(x).exp()
    return F.dropout(x - unused.detach(), 0.1) + F.relu(block.linear(x), inplace=True)


def _reshaped_in_place(block: Block, x: Tensor) -> Tensor:
    """Looks of a tensor change after it was made."""
    wide = block.linear(x) * 2.0
    wide.unsqueeze_(0).mul_(3.0)
    return plain(block, wide.transpose_(1, 2).mT.squeeze(0))


def _writes_into_a_part(block: Block, x: Tensor) -> Tensor:
    """What was made without a gradient has one after a part of it was written to."""
    whole = x.new_empty(*x.shape[:-1], 8)
    whole[..., :4].copy_(block.linear(x))
    whole[..., 4:].copy_(x)
    return block.norm(whole[..., 2:6]) + x


def _several_results(block: Block, x: Tensor) -> Tensor:
    left, right = block.linear(x).chunk(2, dim=-1)
    largest = torch.max(x, dim=-1, keepdim=True)
    first, *_ = largest.values.unbind(0)
    return torch.cat([left + right * first, largest.values.to(x.dtype).expand(x.shape[0], x.size(-1) // 2)], -1)


SAME = {
    "in a row": (plain, in_a_row),
    "all states are used": (plain, _all_states),
    "residuals between": (plain, _skips),
    "written to in place between": (plain, _written_after),
    "pairs, one passed through": (_pairs, _first_of_pairs),
    "dropout and detached": (_dropped, in_a_row),
    "constants": (_constant, in_a_row),
    "changes shape in place": (_reshaped_in_place, in_a_row),
    "writes into a part of what it made": (_writes_into_a_part, in_a_row),
    "calls with several results": (_several_results, in_a_row),
    "in order and back": (plain, _twice),
}


@pytest.mark.parametrize("name", SAME)
def test_of_blocks_that_do_the_same_one_is_exported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.manual_seed(0)
    _, watched = traced_twice(monkeypatch, Stack(*SAME[name]), (torch.randn(3, 4),))
    assert watched == ["blocks.1", "blocks.2", "blocks.3"]


@pytest.mark.parametrize(("call", "count"), [(in_a_row, 1), (_all_states, 1), (_skips, 2), (_written_after, 3)])
def test_blocks_that_follow_each_other_are_decomposed_as_one(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Stack, Tensor], Tensor], count: int
) -> None:
    """To decompose a program takes time for each of its operators: of a thousand blocks in a row it was a third."""
    module, counts = importlib.import_module("autopar.trace.export"), []

    def counted(program: Any) -> Any:
        counts.append(sum(node.target is repeated for node in program.graph.nodes))
        return decompose(program)

    monkeypatch.setattr(module, "decompose", counted)
    trace(Stack(plain, call), torch.ones(2, 4), fewest=2)
    assert counts == [count]


def test_gradient_modes_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same blocks under no_grad and not: what was seen of one says nothing of the other."""
    traced_twice(monkeypatch, Stack(plain, _without_gradient), (torch.randn(3, 4),))


# Blocks that only look the same ----------------------------------------


def _by_index(block: Block, x: Tensor) -> Tensor:
    return plain(block, x) * (1.0 + block.index)


def _every_other(block: Block, x: Tensor) -> Tensor:
    return plain(block, x.flip(-1) if block.index % 2 else x)


def _last_other_line(block: Block, x: Tensor) -> Tensor:
    if block.index == 3:
        return x + block.norm(F.gelu(block.linear(x)))
    return x + block.norm(F.gelu(block.linear(x)))


def _own_constant(block: Block, x: Tensor) -> Tensor:
    return plain(block, x) * torch.tensor([1.0, float(block.index)]).sum()


def _counted(block: Block, x: Tensor, *, times: int) -> Tensor:
    return plain(block, x) * times


def _times(model: Stack, x: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = block(x, times=1 if number < 2 else 2)
    return x


def _wider(model: Stack, x: Tensor) -> Tensor:
    x = model.blocks[1](model.blocks[0](x))
    return model.blocks[3](model.blocks[2](torch.cat([x, x])))


def _asks_for_a_gradient(block: Block, x: Tensor) -> Tensor:
    """Of a tensor whose part was written to; nobody knows what a block that is watched would be told."""
    whole = x.new_empty(x.shape)
    whole[..., :2].copy_(block.linear(x)[..., :2])
    return plain(block, x) if whole.requires_grad else x


OTHER = {
    "layer index in the maths": (_by_index, in_a_row, []),
    "every other": (_every_other, in_a_row, ["blocks.2", "blocks.3"]),
    "same maths on another line": (_last_other_line, in_a_row, ["blocks.1", "blocks.2"]),
    "constants that differ": (_own_constant, in_a_row, []),
    "other arguments": (_counted, _times, ["blocks.1", "blocks.3"]),
    "what it wrote to is asked for its gradient": (_asks_for_a_gradient, in_a_row, []),
    "other shapes": (plain, _wider, ["blocks.1", "blocks.3"]),
}


@pytest.mark.parametrize("name", OTHER)
def test_blocks_that_differ_are_exported_for_themselves(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, call, expected = OTHER[name]
    _, watched = traced_twice(monkeypatch, Stack(function, call), (torch.randn(3, 4),))
    assert watched == expected


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2.0


def _tied(model: Stack) -> None:
    model.blocks[2].linear.weight = model.blocks[1].linear.weight


def _all_tied(model: Stack) -> None:
    for block in model.blocks:
        block.linear.weight = model.first.weight


def _hooked(model: Stack) -> None:
    model.blocks[2].linear.register_forward_hook(_doubled)


def _hooked_outside(model: Stack) -> None:
    model.blocks[2].register_forward_hook(_doubled)


def _frozen_start(model: Stack) -> None:
    model.first.requires_grad_(False)


def _frozen_block(model: Stack) -> None:
    model.blocks[2].requires_grad_(False)


def _not_training(model: Stack) -> None:
    model.blocks[2].eval()


CHANGED = {
    "two blocks share a weight": (_tied, ["blocks.1", "blocks.3"]),
    "all share one": (_all_tied, ["blocks.1", "blocks.2", "blocks.3"]),
    "a hook in one": (_hooked, ["blocks.1", "blocks.3"]),
    "a hook on one": (_hooked_outside, ["blocks.1", "blocks.2", "blocks.3"]),
    "no gradient into the first": (_frozen_start, ["blocks.2", "blocks.3"]),
    "one frozen": (_frozen_block, ["blocks.1", "blocks.3"]),
    "one in evaluation mode": (_not_training, ["blocks.1", "blocks.3"]),
}


@pytest.mark.parametrize("name", CHANGED)
def test_one_block_that_was_changed_is_exported_for_itself(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, expected = CHANGED[name]
    model = Stack(lambda block, x: F.dropout(plain(block, x), 0.5, block.training))
    change(model)
    _, watched = traced_twice(monkeypatch, model, (torch.randn(3, 4),))
    assert watched == expected


# Blocks that no list of calls can tell all about ----------------------------------------


def _writes_to_input(block: Block, x: Tensor) -> Tensor:
    x += block.linear(x)
    return block.norm(x)


def _returns_view(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    return plain(block, x), x[:1]


def _view_is_written(model: Stack, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = x * 1.0
        new, view = block(x)
        view.zero_()
        x = new + x
    return x


def _keeps(block: Block, x: Tensor) -> Tensor:
    block.penalty = [block.linear(x).square().mean()]
    return plain(block, x)


def _with_penalties(model: Stack, x: Tensor) -> Tensor:
    x = in_a_row(model, x)
    return x + sum(block.penalty[0] for block in model.blocks)


def _one_kept(model: Stack, x: Tensor) -> Tensor:
    return in_a_row(model, x) + model.blocks[2].penalty[0]


def _reads_weight(model: Stack, x: Tensor) -> Tensor:
    return in_a_row(model, x) * model.blocks[2].linear.weight.sum()


def _asks_for_parameters(model: Stack, x: Tensor) -> Tensor:
    return in_a_row(model, x) * len(list(model.blocks[3].parameters()))


class _Cache:
    """What blocks keep for each other: an object that torch knows nothing of."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


def _fills(block: Block, x: Tensor, cache: _Cache) -> Tensor:
    cache.kept.append(block.linear(x))
    return plain(block, x) + sum(cache.kept)


def _with_cache(model: Stack, x: Tensor) -> Tensor:
    cache = _Cache()
    for block in model.blocks:
        x = block(x, cache)
    return x


def _with_list(model: Stack, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for block in model.blocks:
        x = block(x, kept)
    return x * len(kept)


def _appends(block: Block, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(x)
    return plain(block, x) * len(kept)


def _no_grad_inside(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.linear(x).mean()
    return plain(block, x) * scale


def _reads_another(block: Block, x: Tensor) -> Tensor:
    return plain(block, x) @ block.others[0].linear.weight


UNCLEAR = {
    "writes to its input": (_writes_to_input, in_a_row, []),
    "returns a view that is written to": (_returns_view, _view_is_written, []),
    "keeps tensors for later": (_keeps, _with_penalties, []),
    "keeps one for later": (_keeps, _one_kept, []),
    "keep tensors for each other": (_fills, _with_cache, []),
    "keep a list": (_appends, _with_list, []),
    "no_grad inside": (_no_grad_inside, in_a_row, []),
    "its weight is used outside": (plain, _reads_weight, ["blocks.1", "blocks.3"]),
    "its parameters are counted": (plain, _asks_for_parameters, ["blocks.1", "blocks.2"]),
    "reads another block": (_reads_another, in_a_row, ["blocks.2", "blocks.3"]),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_where_calls_do_not_tell_all_is_exported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, call, expected = UNCLEAR[name]
    model = Stack(function, call)
    for block in model.blocks:
        block.others = (model.blocks[0],)
    _, watched = traced_twice(monkeypatch, model, (torch.randn(3, 4),))
    assert watched == expected


class Normed(nn.Module):
    """Blocks whose buffers are written to, in a container of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def test_buffers_that_blocks_write_to_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, watched = traced_twice(monkeypatch, Normed(), (torch.randn(5, 4),))
    assert len(graph.mutations) == 9
    assert watched == []


@pytest.mark.parametrize("options", [{"mode": "inference"}, {"compute_dtype": torch.bfloat16}, {"loss_fn": F.l1_loss}])
def test_modes_and_losses_make_no_difference(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    inputs = (torch.randn(3, 4), torch.zeros(())) if "loss_fn" in options else (torch.randn(3, 4),)
    graph, watched = traced_twice(monkeypatch, Stack(plain), inputs, **options)
    assert len(watched) == 3
    assert sum(node.op == "aten.gelu.default" for node in graph.nodes) == 4


def test_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(_every_other)
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    names = list(model.state_dict())
    traced_twice(monkeypatch, model, (torch.randn(3, 4),))
    assert all(module.__dict__ == attributes for module, attributes in before)
    assert list(model.state_dict()) == names
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.sampled(only=("lstm", "hf_mixtral"))
@pytest.mark.parametrize("name", ["lstm", "unet", "hf_llama", "hf_mixtral"])
def test_graphs_of_known_models_are_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    traced_twice(monkeypatch, *zoo.build(name))
