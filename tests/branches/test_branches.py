"""Types of branches, what the verifier refuses of them, where they are found and when they are chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.branches import find_regions, with_branches
from autopar.branches.search import assign
from autopar.errors import AutoparError, PlanError
from autopar.ir.branches import in_order
from autopar.ir.graph import Graph
from autopar.ir.plan import Branch, Fork, Plan
from autopar.microbatch import check_plan
from autopar.profiler import load_profile
from autopar.simulate import simulate
from autopar.simulate.passes import Meet
from autopar.simulate.unlike import Keys, played_together
from autopar.trace import trace
from models import inception, two_towers
from tests.branches.cases import case, forks, in_branches, plan, regions

# The type: what leaves is P, and the gradients of what enters are P ----------------------------------------


def _axis(index: int) -> rt.Axis:
    return rt.Axis("tp", 3, index, None)


@pytest.mark.parametrize("coordinate", range(3))
def test_sums_over_ranks_are_the_function(coordinate: int) -> None:
    torch.manual_seed(coordinate)
    weight, frozen, unused = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    x, count = torch.randn(5, 4, dtype=torch.float64), torch.arange(5)

    def function(x: Tensor, count: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(x @ weight) * frozen.sum() + count[:, None]
        return hidden.exp(), hidden.detach().mean(0)

    def run(index: int) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, unused)]
        made = rt.owned(
            _axis(index), coordinate, lambda x, count: function(x, count, leaves[1]), [leaves[0], count],
            [leaves[1], leaves[2], frozen],
            [rt.Zeros((5, 4), torch.float64), rt.Zeros((4,), torch.float64, False)],
        )  # fmt: skip
        assert not made[1].requires_grad
        made[0].backward(torch.ones_like(made[0]))
        assert all(leaf.grad is not None for leaf in leaves), "every rank hands out a summand"
        return [made[0].detach(), made[1], *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    sums = [torch.stack(parts).sum(0) for parts in zip(*map(run, range(3)), strict=True)]
    alone = [t.clone().requires_grad_() for t in (x, weight)]
    value, mean = function(alone[0], count, alone[1])
    value.sum().backward()
    wanted = [value.detach(), mean, alone[0].grad, alone[1].grad, torch.zeros_like(unused)]
    for own, whole in zip(sums, wanted, strict=True):
        torch.testing.assert_close(own, whole, rtol=0, atol=0)


def test_without_gradients_only_one_rank_runs() -> None:
    ran = []

    def run(x: Tensor) -> tuple[Tensor]:
        ran.append(1)
        return (x + 1,)

    with torch.no_grad():
        made = [rt.owned(_axis(n), 1, run, [torch.ones(2)], [], [rt.Zeros((2,), torch.float32)])[0] for n in range(3)]
    assert len(ran) == 1
    assert torch.equal(torch.stack(made).sum(0), torch.full((2,), 2.0))


# Plans ----------------------------------------


def test_plan_comes_back_from_json() -> None:
    own = plan("two_towers", 1, 2, (0, 1))
    text = own.to_json()
    assert Plan.from_json(text) == own
    assert Plan.from_json(text).to_json() == text
    assert own.stage.forks[0].axis == "tp"


def test_what_is_said_of_branches() -> None:
    own = plan("two_towers", 1, 2, (0, 1))
    assert "beside each other on tp: 0: user (11 operators); 1: item" in str(own)
    text = own.explain("item")
    assert "at tp=1 alone" in text
    assert "beside each other on tp" in text
    without = own.placed(forks=())
    assert "branches: none | beside each other" in without.diff(own)


def _moved(own: Plan, **changes: Any) -> Plan:
    """The plan with its only fork changed."""
    return own.placed(forks=(replace(own.stage.forks[0], **changes),))


def _branches(own: Plan) -> tuple[Branch, ...]:
    return own.stage.forks[0].branches


REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "another axis": (lambda p: _moved(p, axis="dp"), "mesh axis of several ranks"),
    "a coordinate that is none": (
        lambda p: _moved(p, branches=(replace(_branches(p)[0], coordinate=2), _branches(p)[1])),
        "at each of some coordinates",
    ),
    "a coordinate twice": (
        lambda p: _moved(p, branches=tuple(replace(b, coordinate=1) for b in _branches(p))),
        "at each of some coordinates",
    ),
    "an unknown node": (lambda p: _moved(p, branches=(Branch(0, ("nothing",)),)), "nodes of the model"),
    "a node twice": (lambda p: _moved(p, branches=tuple(
        replace(b, nodes=(*b.nodes, "relu")) for b in _branches(p))), "in several"),
    "a constant or a loss": (lambda p: _moved(p, branches=(Branch(0, ("cross_entropy_loss",)),)), "a loss"),
    "a node left out": (lambda p: _moved(p, branches=(
        replace(_branches(p)[0], nodes=tuple(n for n in _branches(p)[0].nodes if n != "relu")),
        _branches(p)[1])), "no path leaves and enters again|no rule|no way|nothing redistributes"),
    "a way around": (lambda p: _moved(p, branches=(
        Branch(0, ("linear",)), Branch(1, ("linear_1",)))), "no path leaves|P|rule"),
    "branches that read each other": (lambda p: _moved(p, branches=(
        Branch(0, ("linear",)), Branch(1, ("relu",)))), "run at the same time"),
    "no fork where placements ask for one": (lambda p: p.placed(forks=()), "a rule"),
    "regathered parameters": (lambda p: p.placed(storage={
        name: replace(kept, regather=True) for name, kept in p.stage.storage.items()}), "regathered"),
    "recomputed": (lambda p: replace(p, recompute=("user",)), "computed again"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_verifier_refuses(name: str) -> None:
    change, words = REFUSED[name]
    _, _, graph = case("two_towers")
    own = plan("two_towers", 1, 2, (0, 1))
    check_plan(graph, own)
    with pytest.raises(AutoparError, match=words):
        check_plan(graph, change(own))


class _Odd(nn.Module):
    """Two branches of which one draws random numbers, or hands out integers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(self.left(x)), torch.relu(self.right(x))
        if self.kind == "random":
            right = F.dropout(right, 0.5)
        if self.kind == "integers":
            right = torch.gather(right, 1, right.argmax(1, keepdim=True).expand(-1, 4))
        return (left * right).sum()


def _odd(kind: str) -> tuple[Graph, Plan]:
    model, batch = _Odd(kind), {"x": torch.randn(4, 4)}
    graph = trace(model, batch)
    return graph, autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=2), batch, tp=2)


def test_random_numbers_are_refused() -> None:
    graph, base = _odd("random")
    assert not regions(graph)
    names = tuple(node.name for node in graph.nodes if "dropout" in node.op)
    with pytest.raises(AutoparError, match="random numbers"):
        check_plan(graph, base.placed(forks=(Fork("tp", (Branch(0, names),)),)))


def test_integers_stay_inside() -> None:
    graph, base = _odd("integers")
    own = in_branches(graph, base, forks(graph, "tp", (0, 1)))
    check_plan(graph, own)  # inside they are welcome
    (fork,) = own.stage.forks
    outside = ("aten.gather", "aten.expand")

    def without(branch: Branch) -> Branch:
        kept = (name for name in branch.nodes if not graph.node_by_name[name].op.startswith(outside))
        return replace(branch, nodes=tuple(kept))

    cut = tuple(map(without, fork.branches))
    with pytest.raises(AutoparError, match="to leave a branch"):
        check_plan(graph, own.placed(forks=(replace(fork, branches=cut),)))


# Finding ----------------------------------------


def test_regions_of_the_models() -> None:
    (towers,) = regions(case("two_towers")[2])
    assert [branch[0] for branch in towers.branches] == ["embedding", "linear_2"]
    found = regions(case("inception")[2])
    assert [len(region.branches) for region in found] == [4, 4]


def test_what_is_refused_in_one_search_for_regions_is_not_in_the_next() -> None:
    """What stands between forks and joins is found once for a graph, whatever of it may not be in a branch."""
    graph = _random_graph(0)
    every = find_regions(graph, lambda node: False)
    assert every and not find_regions(graph, lambda node: True)
    assert find_regions(graph, lambda node: False) == every


def test_regions_against_paths() -> None:
    """Nothing leads into a branch but from before the fork, nothing out of one but to the join; on random graphs."""
    for seed in range(8):
        graph = _random_graph(seed)
        for region in find_regions(graph, lambda node: False):
            names = [set(branch) for branch in region.branches]
            for own, other in itertools.permutations(names, 2):
                made = {t for name in own for t in graph.node_by_name[name].results}
                assert not any(made & set(graph.node_by_name[name].operands) for name in other)
            for name in set().union(*names):
                readers = {r.name for t in graph.node_by_name[name].results for r, _ in graph.consumers[t]}
                own = next(branch for branch in names if name in branch)
                assert readers <= own | {region.join}


def _random_graph(seed: int) -> Graph:
    choose = random.Random(seed)
    drawn = [(choose.randrange(n), choose.randrange(n), choose.random() < 0.5) for n in range(1, 13)]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values = [x]
            for one, other, is_tanh in drawn:
                values.append(torch.tanh(values[one]) if is_tanh else values[one] * values[other])
            return torch.stack(values).sum()

    return trace(Model(), {"x": torch.randn(3)}, mode="inference")


def test_assignment_is_the_best() -> None:
    choose = random.Random(1)
    for count, size in ((2, 2), (4, 2), (5, 3), (6, 4)):
        times = [choose.randrange(100) for _ in range(count)]
        loads = [0] * size
        for time, coordinate in zip(times, assign(times, size), strict=True):
            loads[coordinate] += time
        every = itertools.product(range(size), repeat=count)
        least = min(
            max(sum(t for t, c in zip(times, one, strict=True) if c == k) for k in range(size)) for one in every
        )
        assert max(loads) == least


# Simulation and choice ----------------------------------------


def test_collectives_between_branches_start_together() -> None:
    _, _, graph = case("inception")
    timeline = simulate(graph, plan("inception", 1, 2, (0, 1)), load_profile("cpu"))
    first, second = ([(e.name, e.kind, e.start_ns, e.end_ns) for e in timeline.events
                      if e.stream[0] == rank and e.stream[1] != "compute"] for rank in (0, 1))  # fmt: skip
    assert first == second and len(first) > 15
    compute = [lane.breakdown.compute_ns for lane in timeline.lanes]
    assert compute[0] != compute[1]
    assert [sum(vars(lane.breakdown).values()) for lane in timeline.lanes] == [timeline.step_time_ns] * 2


def test_lanes_without_branches_are_the_plan_s() -> None:
    """With everything at one coordinate, that rank has no less to do than alone, and the other waits."""
    _, _, graph = case("two_towers")
    own = plan("two_towers", 1, 2, (1,))
    busy, idle = (lane.breakdown.compute_ns for lane in reversed(simulate(graph, own, load_profile("cpu")).lanes))
    assert busy > 2 * idle
    assert len(in_order(graph, own.stage)) == len(graph.nodes)


def test_chosen_where_faster() -> None:
    """One image cannot be split by samples, and its convolutions are too short to be split otherwise: on GPUs, branches
    spare launches."""
    config = inception.Config(modules="AE", image_size=35, width=0.5, batch_size=1, norm=False)
    with torch.device("meta"):
        model, batch = inception.build(config).eval(), inception.example_inputs(config)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    found = autopar.parallelize(model, mesh, batch, mode="inference", search="fast").plan
    assert found.stage.forks
    chosen = [choice for choice in found.choices if choice.kind == "fork"]
    assert all(choice.alternatives[0].extra_ns > 0 for choice in chosen)
    before = chosen[0].cost_ns + chosen[0].alternatives[0].extra_ns
    assert found.predicted.step_time_ns == chosen[-1].cost_ns < before
    assert Plan.from_json(found.to_json()) == replace(found, simulator=None)


def test_what_is_pinned_stays_out_of_branches() -> None:
    config = inception.Config(modules="AA", pool_channels=(32, 32), image_size=35, width=0.5, batch_size=1, norm=False)
    with torch.device("meta"):
        model, batch = inception.build(config).eval(), inception.example_inputs(config)
    mesh, rule = autopar.Mesh("h100", devices_per_node=2), autopar.Constraint("modules_.0.*", ("R", "I"))
    found = autopar.parallelize(model, mesh, batch, mode="inference", search="fast", constraints=[rule]).plan
    inside = [found.scopes[name] for fork in found.stage.forks for branch in fork.branches for name in branch.nodes]
    assert any(scope.startswith("modules_.1.") for scope in inside), "the module like it, which is not pinned"
    assert not any(scope.startswith("modules_.0.") for scope in inside)


def test_not_chosen_where_gradients_cost_more() -> None:
    """Towers of wide layers: split by columns, no gradient of a parameter travels; in branches, all do."""
    config = replace(two_towers.large(4), num_items=1000)
    with torch.device("meta"):
        model, batch = two_towers.build(config), two_towers.example_inputs(config)
    plan = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=2), batch, search="fast").plan
    assert not any(stage.forks for stage in plan.stages)


def test_nothing_changes_that_is_not_faster() -> None:
    _, _, graph = case("two_towers")
    base = plan("two_towers", 1, 2, (0, 1))
    fast = replace(base.placed(forks=()), predicted=replace(base.predicted, step_time_ns=1))
    scored: list[Plan] = []

    def score(one: Plan) -> Plan:
        scored.append(one)
        return replace(one, predicted=replace(one.predicted, step_time_ns=1, peak_bytes=0))

    unbranched = autopar.template_plan(*case("two_towers")[:1], fast.mesh, case("two_towers")[1], tp=2)
    unbranched = replace(unbranched, predicted=replace(unbranched.predicted, step_time_ns=1), simulator=None)
    assert with_branches(graph, unbranched, load_profile("h100"), score, lambda name: name, 5.0) is unbranched


class Scattered(nn.Module):
    """Two branches, of which one reads a tensor for its dtype alone: it hands no gradient back of that."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.query(x), self.key(x)
        turned = torch.cat([-key[..., 4:], key[..., :4]], -1).sin()
        joined = query.new_zeros(*key.shape[:-1], 24)  # a part of it is never written
        joined[..., :8] = key
        joined[..., 8:16] = turned
        return (joined.square().sum(-1) + query.sum(-1)).mean()


def test_ranks_meet_where_a_branch_hands_no_gradient_back() -> None:
    batch = (torch.randn(4, 8),)
    graph = trace(Scattered(), batch)
    names = {node.op.split(".")[1]: node.name for node in graph.nodes}
    turned = tuple(n.name for n in graph.nodes if n.op.split(".")[1] in ("neg", "cat", "sin"))
    made = (names["new_zeros"], next(n.name for n in graph.nodes if "slice_scatter" in n.op))
    base = autopar.template_plan(Scattered(), autopar.Mesh("cpu", devices_per_node=2), batch, tp=2)
    own = in_branches(graph, base, [Fork("tp", (Branch(0, turned), Branch(1, made)))])
    timeline = simulate(graph, own, load_profile("cpu"))
    first, second = ([(e.name, e.start_ns) for e in timeline.events if e.stream[0] == rank and e.stream[1] != "compute"]
                     for rank in (0, 1))  # fmt: skip
    assert first == second and first


def test_ranks_meet_where_a_branch_begins_with_what_has_no_gradient() -> None:
    """Its first operator hands out the gradients of all: where that has none itself, they were never sent, and plans
    of models that are given a row of an input for each block ended in an error."""
    own = plan("scaled", 1, 2, (0,))
    assert own.stage.forks[0].branches[0].nodes[0].startswith("select")
    timeline = simulate(case("scaled")[2], own, load_profile("cpu"))
    first, second = ([(e.name, e.start_ns) for e in timeline.events if e.stream[0] == rank and e.stream[1] != "compute"]
                     for rank in (0, 1))  # fmt: skip
    assert first == second and {name.split()[0] for name, _ in first} >= {"gradient"}


def test_lanes_that_wait_for_what_does_not_come_are_told_so() -> None:
    keys: Keys = {0: [(), ()], 1: [(), ()]}
    assert played_together(keys, [0, 5], [lambda meet: meet(0, 7), lambda meet: meet(0, 1)]) == [7, 2]
    for other in (lambda meet: 0, lambda meet: meet(1, 3)):
        with pytest.raises(PlanError, match="the same collectives in the same order"):
            played_together(keys, [0, 0], [lambda meet: meet(0, 7), other])
    with pytest.raises(PlanError, match="the same collectives in the same order"):  # each waits for the other's first
        played_together(
            keys, [0, 0], [lambda meet: meet(1, meet(0, 7) + 1), lambda meet: meet(0, meet(1, 7) + 1)]
        )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        played_together(keys, [0, 0], [lambda meet: meet(0, 7), lambda meet: 1 // 0])


def test_lanes_meet_as_if_each_step_waited_for_the_other() -> None:
    """Each is the later one in turn, so that what one starts follows from when the other was there before."""

    def lane(*works: int) -> Callable[[Meet], int]:
        def play(meet: Meet) -> int:
            now = 0
            for work in works:
                now = meet(0, now + work) + 1
            return now

        return play

    first, second = (5, 1, 9, 2, 4), (2, 7, 3, 8, 1)
    ends = played_together({0: [(), ()]}, [0, 0], [lane(*first), lane(*second)])
    assert ends == [sum(map(max, first, second)) + len(first)] * 2
