"""The count of a mean loss's targets: sent at the top of forward where it can be, as the emitted program does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.cost import Profile
from autopar.cost.profile import Waits
from autopar.emit import emit
from autopar.ir.mesh import Mesh
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.simulate import Timeline, simulate, traffic
from autopar.trace import trace

MESH = Mesh("a100", devices_per_node=2)
LOSS_BYTES = 4  # of the loss itself, for which nothing in the step waits
STARTS = "count = rt.start_valid_count("


class Whole(nn.Module):
    """Targets are an input, one place further."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), labels.roll(1, 1).flatten())


class Looked(Whole):
    """Targets are looked up in what the model stores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("names", torch.arange(16).flip(0))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        names = self.get_buffer("names")
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), names[labels.flatten()])


class Inside(nn.Module):
    """The loss lies in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Whole()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels)
        return loss


def data_parallel(make: Callable[[], nn.Module]) -> tuple[str, Timeline, dict[str, int]]:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    graph = trace(make(), {"tokens": tokens, "labels": tokens})
    plan = template_of_graph(graph, MESH, dp=2)
    return emit(graph, plan), simulate(graph, plan, waiting()), traffic(graph, plan)


def waiting() -> Profile:
    """Whose ranks wait a microsecond at each collective that stops them."""
    profile = load_profile("a100")
    waits = Waits("intra_node", 2, ((0, 1000),), profile.facts.provenance)
    return replace(profile, waits={("intra_node", 2): waits}, _shared={})


def counted(played: Timeline) -> list[str]:
    tasks = [task for piece in played.lanes[0].pieces for task in piece.tasks]
    return [name for _, name, _, _, kind in tasks if kind == "operator all_reduce"]


@pytest.mark.parametrize(("make", "is_early"), [(Whole, True), (Looked, False), (Inside, False)])
def test_a_count_that_starts_early_stops_no_rank(make: Callable[[], nn.Module], is_early: bool) -> None:
    source, played, sent = data_parallel(make)
    assert (STARTS in source) == is_early
    assert counted(played) == ([] if is_early else ["cross_entropy_loss"])
    assert ("operator all_reduce" in played.exposed) != is_early
    assert played.comm_bytes["all_reduce"] == sent["all_reduce"] - LOSS_BYTES


def test_what_is_early_in_the_simulation_is_as_long_as_without_a_count() -> None:
    """But for the count, the step of a mean over targets that are inputs is that of their sum."""

    class Sum(Whole):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embedding(tokens)).flatten(0, 1)
            return F.cross_entropy(logits, labels.roll(1, 1).flatten(), reduction="sum")

    mean, total = (data_parallel(make)[1] for make in (Whole, Sum))
    launch_ns = load_profile("a100").host.collective_ns if load_profile("a100").host else 0
    assert mean.step_time_ns - total.step_time_ns in (0, launch_ns)
