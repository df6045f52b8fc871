"""Units are asked for ahead in the order in which a backward pass with recomputed calls comes to them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.runtime as rt
from autopar import Mesh
from autopar.pipeline import template_of_graph
from autopar.runtime.gathering import Gatherer, Unit
from autopar.runtime.mesh import RankMesh
from autopar.simulate import traffic
from tests.constructs.written import Written
from tests.random_programs.check import plan_problems
from tests.random_programs.kinds.practice import practice_subject


class _Inner(rt.Block):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.leaf).sin()


class _Layer(rt.Block):
    """Parameters of its own before and between those of two inner units."""

    def __init__(self, mesh: RankMesh) -> None:
        super().__init__(mesh)
        self.attention, self.mlp = _Inner(mesh), _Inner(mesh)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention((x * self.leaf).sin())
        return x + self.mlp((x * self.leaf).cos())


class _Model(rt.Block):
    def __init__(self, mesh: RankMesh, again: tuple[bool, ...]) -> None:
        super().__init__(mesh)
        self.again = again
        for number in range(len(again)):
            setattr(self, f"layer{number}", _Layer(mesh))

    def forward(self, x: Tensor) -> Tensor:
        for number, is_again in enumerate(self.again):
            layer = getattr(self, f"layer{number}")
            x = rt.recomputed(layer, x) if is_again else layer(x)
        return x


class _Recording(Unit):
    """One regathered parameter, of which it is noted when it is asked for and when the pass waits for it."""

    def __init__(self, block: rt.Block, name: str, is_root: bool, log: list[tuple[str, str]]) -> None:
        super().__init__(block, [], is_root)
        self.name, self.log, self.is_there = name, log, False
        if not is_root:
            block.__dict__["leaf"] = torch.ones(3, requires_grad=True)
            self.regathered: list[Any] = [
                SimpleNamespace(
                    leaf=block.__dict__["leaf"], holder=SimpleNamespace(late_tensors={}), attribute="", is_live=False,
                    is_pinned=False,
                )
            ]  # fmt: skip

    def launch(self) -> None:
        if self.regathered and not self.is_there:
            self.is_there = True
            self.log.append(("ask", self.name))

    def finish(self) -> None:
        assert self.is_there or not self.regathered or self.is_done, f"{self.name} is read before it is asked for"
        if self.regathered:
            self.log.append(("wait", self.name))

    def release(self, *, all_slots: bool = False) -> None:
        self.is_there = False


def logged(again: tuple[bool, ...]) -> list[tuple[str, str]]:
    """What the second microbatch's backward pass asks for and waits for."""
    mesh = RankMesh((), None, torch.device("cpu"))
    model, log = _Model(mesh, again), list[tuple[str, str]]()
    units = [_Recording(block, name, block is model, log) for name, block in model.named_modules()]
    gatherer = Gatherer(units)

    def done(unit: Unit) -> Callable[[Tensor], None]:
        return lambda leaf: gatherer.gradient_done(unit)

    for unit in units:
        for slot in unit.regathered:
            slot.leaf.register_post_accumulate_grad_hook(done(unit))
    for _ in range(2):
        gatherer.begin_forward()
        loss = model(torch.ones(3, requires_grad=True)).sum()
        log.clear()
        gatherer.begin_backward()
        loss.backward()
        gatherer.end_pass()
    return log


def in_the_open(log: list[tuple[str, str]]) -> list[str]:
    """Units that are waited for as soon as they were asked for, with nothing computed between."""
    found, since = [], list[str]()
    for what, name in log:
        if what == "ask":
            since.append(name)
        else:
            found += [name] if name in since else []
            since = []
    return found


def test_no_unit_of_a_recomputed_call_is_gathered_in_the_open() -> None:
    log = logged((True, True, True))
    assert [name for what, name in log if what == "ask"] == [
        f"layer{number}{inner}" for number in (2, 1, 0) for inner in ("", ".attention", ".mlp")
    ]
    assert in_the_open(log) == ["layer2"], "but for the first, which nothing is ahead of"
    last = log.index(("wait", "layer2.mlp"))
    assert log[last - 2 : last] == [("ask", "layer1"), ("ask", "layer1.attention")]


def test_only_what_a_call_begins_with_is_ahead_of_it() -> None:
    log = logged((True, True))
    place = log.index(("wait", "layer1.mlp"))
    assert ("ask", "layer0.mlp") not in log[:place]
    assert log.index(("ask", "layer0.mlp")) == log.index(("wait", "layer0.attention")) - 1


@pytest.mark.parametrize("again", [(False, True, False), (True, False, True), (False, False, False)])
def test_calls_that_keep_what_they_compute_are_asked_for_in_reverse(again: tuple[bool, ...]) -> None:
    log = logged(again)
    asked = [name for what, name in log if what == "ask"]
    assert len(asked) == len(set(asked)) == 9, "each once"
    waited = list(dict.fromkeys(name for what, name in log if what == "wait"))
    for number, is_again in enumerate(again):
        own = [name.rpartition(".")[2] for name in waited if name.startswith(f"layer{number}.")]
        assert own == (["attention", "mlp"] if is_again else ["mlp", "attention"])
    for number, is_again in enumerate(again[:-1]):
        first = f"layer{number}.attention" if is_again else f"layer{number}.mlp"
        assert first not in in_the_open(log)


_READ_BY_OTHERS = """
import torch
import torch.nn.functional as F
from torch import nn

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.tensor(2.0))
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(x * self.scale)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = First(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return F.linear(self.layer(self.first(x)), self.first.table).square().mean()

def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(8, 8)}
"""


def test_what_others_read_is_not_asked_for_again_when_its_gradient_is_there() -> None:
    """A block's weight that something later alone reads (a head, tied to the table of an embedding that another stage
    looks up) was gathered once more in the second microbatch's backward pass, for a block that had no need of it."""
    subject = practice_subject(Written("", _READ_BY_OTHERS), 0)
    plan = template_of_graph(subject.graph, Mesh("cpu", devices_per_node=2), dp=2, zero=3, microbatches=2)
    assert plan_problems(subject, plan, traffic(subject.graph, plan)) == []


def test_what_a_pass_returns_of_a_parameter_outlasts_it() -> None:
    """A view of a weight that is freed when the pass ends was sent to another stage after that: memory that nobody has,
    which ended the process."""
    weight, kept = torch.arange(12.0).view(3, 4), torch.ones(3)
    gatherer = object.__new__(Gatherer)
    gatherer.units = [SimpleNamespace(regathered=[SimpleNamespace(leaf=weight, is_live=True)])]  # type: ignore[list-item]
    (rows, same), named = gatherer.outlasting(((weight[:2], kept), {"column": weight[:, 0]}))
    weight.untyped_storage().resize_(0)
    assert rows.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert named["column"].tolist() == [0.0, 4.0, 8.0]
    assert same is kept
