"""Each search, and the solver made of them, against trying every choice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from autopar.clock import Clock
from autopar.errors import InfeasibleError
from autopar.selection import hard, solver, toulbar
from autopar.selection.branching import PriceBranching, split, without_what_cannot_fit
from autopar.selection.duals import PriceSearch
from autopar.selection.evaluator import evaluate
from autopar.selection.exact import ExactOutcome, search_exactly
from autopar.selection.neighbourhood import NeighbourhoodSearch
from autopar.selection.network import Network, Use
from autopar.selection.problem import INFINITE, Problem
from autopar.selection.reduction import reduce_problem
from autopar.selection.repair import repair
from autopar.selection.solver import minimise_peak, solve
from autopar.selection.start import fitting_choice, frugal_choice
from autopar.selection.subproblems import Subproblems
from autopar.selection.toulbar import SearchApart, minimise_here
from autopar.selection.toulbar_worker import NO_BACKTRACK_LIMIT, Result
from autopar.selection.usage import Usage
from tests.selection.oracle import every_value, least_cost, least_peak, random_problem, reducible_problem

UNKNOWN = ExactOutcome(None, INFINITE, 0)


def later(seconds: float = 20.0) -> Clock:
    return Clock.of_time(seconds)


def case(seed: int, **how: float) -> tuple[Problem, Network, int | None]:
    """Returns a problem that reduction leaves open, its network, and the least cost."""
    problem, network = reducible_problem(seed, **how)
    return problem, network, least_cost(problem)


def fitting_start(network: Network, chance: random.Random) -> list[int] | None:
    """Returns some choice that fits and is not forbidden."""
    timeline = Usage(network)
    for _ in range(500):
        values = [chance.randrange(len(costs)) for costs in network.unary]
        if network.cost(values) < INFINITE and timeline.excess(values).max() <= 0:
            return values
    return None


# --- toulbar2 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(15))
def test_toulbar_with_all_rows_finds_the_optimum(seed: int) -> None:
    _, network, least = case(seed, tightness=0.4)
    timeline = Usage(network)
    rows = [timeline.row(int(start)) for start in network.room_starts]
    if any(row.slack < 0 for row in rows):
        assert least is None
        return
    result = minimise_here(network, rows, INFINITE, NO_BACKTRACK_LIMIT, 0)
    assert result["complete"]
    assert result["lower_bound"] == (INFINITE if least is None else least)
    assert (None if result["choice"] is None else network.cost(result["choice"])) == least


def test_an_upper_bound_that_nothing_beats_is_returned_as_the_bound() -> None:
    _, network, _ = case(1, tightness=1.0)
    least = minimise_here(network, (), INFINITE, NO_BACKTRACK_LIMIT, 0)["lower_bound"]
    result = minimise_here(network, (), least, NO_BACKTRACK_LIMIT, 0)
    assert (result["choice"], result["lower_bound"]) == (None, least)


@pytest.mark.parametrize("backtracks", [1, 20, 300])
def test_no_search_leaves_a_trace_on_the_next(backtracks: int) -> None:
    """The library went on without best-first search after a limit, and with weaker bounds after a contradiction."""
    network = hard_network(9)
    first = minimise_here(network, (), INFINITE, backtracks, 0)
    assert not first["complete"]
    minimise_here(hard_network(30), (), 5, NO_BACKTRACK_LIMIT, 0)
    minimise_here(hard_network(30), (), INFINITE, 1, 0)
    assert minimise_here(network, (), INFINITE, backtracks, 0) == first


@pytest.mark.parametrize("message_passing", [False, True])
def test_search_apart_agrees_with_search_here(message_passing: bool) -> None:
    _, network, _ = case(2, tightness=1.0)
    here = minimise_here(network, (), INFINITE, NO_BACKTRACK_LIMIT, 0)
    apart = SearchApart(network, (), INFINITE, 0, message_passing=message_passing).result(later().wait_until)
    assert apart["choice"] is not None and here["choice"] is not None
    assert network.cost(apart["choice"]) == network.cost(here["choice"]) == apart["lower_bound"]


def hard_network(num_variables: int = 120) -> Network:
    """Returns a dense random network without rows that takes toulbar2 far longer than a test may."""
    chance = np.random.default_rng(0)
    unary = [chance.integers(0, 1000, 12) for _ in range(num_variables)]
    pairs = {(i, j): chance.integers(0, 1000, (12, 12)) for i in range(num_variables) for j in range(i)}
    pairs = {(j, i): matrix.T for (i, j), matrix in pairs.items()}
    return Network(unary, pairs, (), np.zeros(1, np.int64), np.full(1, INFINITE), ())


def test_a_search_apart_ends_at_its_deadline_and_claims_no_proof() -> None:
    network = hard_network()
    started = time.monotonic()
    result = SearchApart(network, (), INFINITE, 0).result(later(2.0).wait_until)
    assert time.monotonic() - started < 10
    assert not result["complete"]
    if result["choice"] is not None:
        assert result["lower_bound"] < network.cost(result["choice"])


def test_a_cancelled_search_leaves_no_process() -> None:
    search = SearchApart(hard_network(), (), INFINITE, 0)
    assert not search.done
    search.cancel()
    assert search.done


def test_an_exact_search_ends_at_its_deadline_whatever_its_rows_take() -> None:
    """Five hundred backtracks through these rows, which the first choice violates by a quarter, take a minute."""
    network, chance, num_times = hard_network(40), np.random.default_rng(1), 40
    uses = [
        Use(variable, start, min(start + 8, num_times), chance.integers(0, 10**6, len(costs)))
        for variable, costs in enumerate(network.unary)
        for start in range(0, num_times, 3)
    ]
    network = replace(network, uses=uses, room_starts=np.arange(num_times), room=np.zeros(num_times, np.int64))
    most = Usage(network).excess([0] * network.num_variables).max()
    network = replace(network, room=np.full(num_times, int(0.8 * most)))
    started = time.monotonic()
    outcome = search_exactly(network, later(1.0), 0, times=range(num_times))
    assert time.monotonic() - started < 20
    assert not outcome.complete


# --- exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tightness", [0.15, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(15))
def test_rows_as_needed_find_the_optimum_or_prove_that_there_is_none(seed: int, tightness: float) -> None:
    _, network, least = case(seed, tightness=tightness)
    outcome = search_exactly(network, later(), 0)
    assert outcome.complete
    assert (outcome.cost, outcome.values is None) == (INFINITE if least is None else least, least is None)


@pytest.mark.parametrize("seed", range(10))
def test_an_upper_bound_hides_the_optimum_but_not_what_is_proven(seed: int) -> None:
    _, network, least = case(seed, tightness=0.8, forbidden=0.0)
    assert least is not None
    at_the_optimum = search_exactly(network, later(), 0, upper_bound=least)
    assert (at_the_optimum.values, at_the_optimum.lower_bound >= least) == (None, True)
    assert search_exactly(network, later(), 0, upper_bound=least + 1).cost == least


# --- prices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_prices_bound_the_optimum_from_below_and_settle(seed: int) -> None:
    _, network, least = case(seed, tightness=0.3, forbidden=0.05)
    search = PriceSearch(network)
    free_bound = None
    for _ in range(60):
        search.learn(minimise_here(search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
        free_bound = search.lower_bound if free_bound is None else free_bound
        if search.settled:
            break
    assert search.settled
    assert free_bound <= search.lower_bound
    if least is not None:
        assert search.lower_bound <= least


def test_prices_find_the_best_dual_bound_of_one_row() -> None:
    """Each variable pays 10, 20 or 30, or nothing while it uses 10; there is room for one of the three.

    L(λ) = min(10, 10 λ) + min(20, 10 λ) + min(30, 10 λ) − 10 λ is largest from λ = 2 to 3, where it is 30: what
    the best choice costs, so that there is no gap.
    """
    problem = Problem(
        "three", [(0, 1)] * 3, [[10, 0], [20, 0], [30, 0]], [[0, 10]] * 3, [], [], usage_limit=10
    )  # fmt: skip
    search = PriceSearch(reduce_problem(problem))
    while not search.settled:
        search.learn(minimise_here(search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    assert search.lower_bound == least_cost(problem) == 30


def test_however_dear_memory_is_nothing_allowed_becomes_forbidden() -> None:
    """A saturated price once counted as forbidden, so that a bound said that nothing was feasible."""
    problem = Problem("dear", [(0, 1)] * 2, [[1, 0], [1, 0]], [[0, 10]] * 2, [], [], usage_limit=10)
    search = PriceSearch(reduce_problem(problem))
    search.learn(minimise_here(search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    search.prices = dict.fromkeys(search.times, 1e12)
    dear = search.restricted(search.allowed)
    dear.learn(minimise_here(dear.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    assert dear.lower_bound <= least_cost(problem) == 1


def test_prices_end_when_nothing_is_found() -> None:
    _, network, _ = case(1)
    search = PriceSearch(network)
    search.next_network()
    search.learn(Result(choice=None, lower_bound=0, complete=False))
    assert search.settled and search.lower_bound == 0


# --- neighbourhoods and repair --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(15))
def test_neighbourhoods_only_improve_always_fit_and_reach_the_optimum(seed: int) -> None:
    _, network, least = case(seed, num_nodes=8, tightness=0.5, forbidden=0.02)
    start = fitting_start(network, random.Random(seed))
    assert least is not None and start is not None
    parts = Subproblems(network)
    search = NeighbourhoodSearch(parts, start, seed)
    for _ in range(30):
        before = search.cost
        assert search.step(later())
        assert least <= search.cost <= before
        assert search.cost == network.cost(search.values)
        assert parts.usage.excess(search.values).max() <= 0
    search.improve(list(range(network.num_variables)), later())
    assert search.cost == least


def test_neighbourhoods_stop_at_the_deadline() -> None:
    _, network, _ = case(3, tightness=1.0, forbidden=0.0)
    search = NeighbourhoodSearch(Subproblems(network), [0] * network.num_variables, 0)
    assert not search.step(later(-1.0))


@pytest.mark.parametrize("seed", range(20))
def test_repair_makes_a_choice_fit_where_one_exists(seed: int) -> None:
    _, network, least = case(seed, num_nodes=8, tightness=0.35, forbidden=0.0)
    parts = Subproblems(network)
    timeline = parts.usage
    hungriest = [
        int(np.argmax(timeline.usages_at(int(network.room_starts[0]))[a:b])) if b > a else 0
        for a, b in zip(timeline.offsets[:-1], timeline.offsets[1:], strict=True)
    ]
    mended = repair(parts, hungriest, later(), seed)
    if least is None:
        assert mended is None
    else:
        assert mended is not None and timeline.excess(mended).max() <= 0


def test_repair_respects_the_cost_limit_and_leaves_what_fits_alone() -> None:
    _, network, _ = case(3, tightness=1.0, forbidden=0.0)
    values = [0] * network.num_variables
    parts = Subproblems(network)
    assert repair(parts, values, later(), 0) == values
    assert repair(parts, values, later(), 0, cost_limit=network.cost(values)) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_first_choice_uses_as_little_as_each_variable_can(seed: int) -> None:
    _, network, _ = case(seed, tightness=0.5, forbidden=0.0)
    parts = Subproblems(network)
    values = frugal_choice(parts)
    usages = np.split(parts.usage.total_usages(), parts.usage.offsets[1:-1])
    assert all(used[value] == used.min() for used, value in zip(usages, values, strict=True))
    assert network.cost(values) < INFINITE


# --- both sides together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_choice_that_fits_is_found_wherever_there_is_one(seed: int) -> None:
    _, network, best = case(seed, tightness=0.2)
    values = fitting_choice(network, later(), seed)
    assert (values is None) == (best is None)
    if values is not None:
        assert network.cost(values) < INFINITE and Usage(network).excess(values).max(initial=0) <= 0


@pytest.mark.parametrize("clock", [Clock.of, Clock.of_time])
@pytest.mark.parametrize("seed", range(8))
def test_the_hard_search_proves_the_optimum_of_easy_problems(seed: int, clock: Callable[[float], Clock]) -> None:
    _, network, least = case(seed, num_nodes=8, tightness=0.35)
    outcome = hard.search_hard(network, UNKNOWN, clock(20.0), 0, 0.0)
    assert outcome.complete
    assert outcome.cost == (INFINITE if least is None else least)


def test_the_hard_search_keeps_its_deadline_and_a_valid_bound() -> None:
    network = hard_network(60)
    started = time.monotonic()
    outcome = hard.search_hard(network, UNKNOWN, later(6.0), 0, 0.0)
    assert time.monotonic() - started < 12
    assert outcome.values is not None
    assert outcome.cost == network.cost(outcome.values)
    assert outcome.lower_bound < outcome.cost, "this network is not solved in seconds"


def test_the_hard_search_by_work_finds_the_same_whatever_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    network, honest = hard_network(60), toulbar.SearchApart.result
    first = hard.search_hard(network, UNKNOWN, Clock.of(0.25), 0, 0.0)

    def late(search: SearchApart, wait_until: float) -> Result:
        time.sleep(0.3)
        return honest(search, wait_until)

    monkeypatch.setattr(toulbar.SearchApart, "result", late)
    again = hard.search_hard(network, UNKNOWN, Clock.of(0.25), 0, 0.0)
    assert first.values is not None and not first.complete
    assert again == first


def test_the_hard_search_proves_what_no_row_binds_with_more_than_a_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard, "_EFFORT", 1)
    network = hard_network(7)
    outcome = hard.search_hard(network, UNKNOWN, later(), 0, 0.0)
    best = minimise_here(network, (), INFINITE, NO_BACKTRACK_LIMIT, 0)["lower_bound"]
    assert outcome.complete and outcome.cost == best


def test_a_search_that_elimination_settles_needs_no_process() -> None:
    _, network, _ = case(2, num_nodes=3, tightness=1.0)
    search = SearchApart(network, (), INFINITE, 0)
    search.interrupt()
    assert search.done and search.result(later().wait_until)["complete"]
    search.cancel()


# --- solve and minimise_peak ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tightness", [0.2, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(15))
def test_solve_returns_the_optimum_or_names_the_smallest_limit(seed: int, tightness: float) -> None:
    problem = random_problem(seed, tightness=tightness)
    least = least_cost(problem)
    if least is not None:
        solution = solve(problem)
        found = evaluate(problem, solution.choice)
        assert (solution.cost, solution.lower_bound, solution.stop_reason) == (least, least, "optimal")
        assert (found.feasible, found.cost, found.peak_usage) == (True, least, solution.peak_usage)
    elif (peak := least_peak(problem)) is None:
        with pytest.raises(InfeasibleError, match="forbidden"):
            solve(problem)
    else:
        with pytest.raises(InfeasibleError, match=f"usage limit of {problem.usage_limit} bytes.* is {peak} bytes"):
            solve(problem)


@pytest.mark.parametrize("seed", range(15))
def test_the_smallest_limit_that_is_named_can_be_met_and_none_below(seed: int) -> None:
    problem = random_problem(seed)
    peak = least_peak(problem)
    if peak is None:
        with pytest.raises(InfeasibleError, match="forbidden"):
            minimise_peak(problem)
        return
    found = minimise_peak(problem)
    assert (found.cost, found.lower_bound, found.stop_reason) == (peak, peak, "optimal")
    assert least_cost(replace(problem, usage_limit=peak)) is not None
    assert peak == 0 or least_cost(replace(problem, usage_limit=peak - 1)) is None


@pytest.mark.parametrize("seed", range(5))
def test_what_the_search_for_the_least_peak_finds_is_an_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _, best = case(seed, tightness=0.6)
    assert best is not None
    monkeypatch.setattr(solver, "_search", lambda *_: (UNKNOWN, "found nothing"))
    solution = solve(problem)
    assert evaluate(problem, solution.choice).feasible and solution.cost >= best


def test_what_is_only_feasible_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(3, tightness=1.0, forbidden=0.0)
    honest = solver.search_exactly
    monkeypatch.setattr(solver, "search_exactly", lambda *a: replace(honest(*a), lower_bound=0))
    monkeypatch.setattr(solver, "search_hard", lambda network, known, *a: known)
    monkeypatch.setattr(solver, "_without_rows", lambda *a: UNKNOWN)
    solution = solve(problem)
    assert (solution.stop_reason, solution.lower_bound) == ("time limit", 0)
    assert solution.gap == 1.0
    assert solve(problem, gap_limit=1.0).stop_reason == "gap limit"


def test_solving_twice_gives_the_same_choice() -> None:
    problem = random_problem(5, num_nodes=8, forbidden=0.0, tightness=0.6)
    assert solve(problem).choice == solve(problem).choice


def test_large_costs_and_usages_stay_exact() -> None:
    """Costs above 2^53 cannot be told apart as doubles: the bound must then be one, and no more."""
    huge = 2**57
    problem = Problem("huge", [(0, 2)] * 2, [[huge + 1, huge + 5], [3, huge]], [[2**50, 1], [1, 2**50]],
                      [(0, 1)], [[[0, 7], [9, 0]]], usage_limit=2**50 + 2)  # fmt: skip
    solution = solve(problem, time_limit_s=3.0)
    least = least_cost(problem)
    assert least is not None
    assert solution.lower_bound <= least <= solution.cost
    assert solution.cost - least <= solution.cost * 1e-12


def test_a_missing_worker_script_is_not_needed_for_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.selection.toulbar.toulbar_worker.__file__", str(Path("/nonexistent")))
    assert solve(random_problem(3, tightness=1.0, forbidden=0.0)).stop_reason == "optimal"


# --- branching on prices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tightness", [0.2, 0.35])
@pytest.mark.parametrize("seed", range(15))
def test_branching_alone_finds_and_proves_the_optimum_or_that_there_is_none(seed: int, tightness: float) -> None:
    _, network, least = case(seed, num_nodes=8, tightness=tightness)
    root, best = PriceSearch(network), INFINITE

    def offer(values: list[int] | None) -> int:
        fits = values is not None and root.usage.excess(values).max() <= 0
        return min(best, network.cost(values)) if fits else best

    while not root.settled:
        best = offer(root.learn(minimise_here(root.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0)))
    tree = PriceBranching(root)
    for _ in range(500):
        node = tree.next_node(best)
        if node is None:
            break
        assert least is None or min(tree.lower_bound, best) <= least
        result = minimise_here(node.search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0)
        best = offer(tree.learn(node, result, best))
    assert tree.finished
    assert best == (INFINITE if least is None else least)
    assert tree.lower_bound >= best


@pytest.mark.parametrize("seed", range(10))
def test_children_share_out_the_parents_values(seed: int) -> None:
    _, network, _ = case(seed, tightness=0.35)
    root = PriceSearch(network)
    root.learn(minimise_here(root.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    sides = split(root)
    if sides is None:
        assert all(np.unique(root.usage.total_usages()[a:b]).size <= 1 for a, b in pairwise(root.usage.offsets))
        return
    assert (sides[0] | sides[1] == root.allowed).all()
    both = np.flatnonzero(sides[0] & sides[1])
    v = int(np.searchsorted(root.usage.offsets, np.flatnonzero(sides[0] != sides[1])[0], side="right")) - 1
    assert both.size == root.allowed.size - len(network.unary[v])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_not_to_fit_is_in_no_choice_that_fits(seed: int) -> None:
    _, network, _ = case(seed, tightness=0.35, forbidden=0.0)
    search = PriceSearch(network)
    for _ in range(3):
        search.learn(minimise_here(search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    left = without_what_cannot_fit(search, search.allowed)
    positions = search.usage.offsets[:-1]
    for values in every_value(network):
        if search.usage.excess(values).max() <= 0:
            assert left is not None and left[positions + np.array(values)].all()


def test_an_infeasible_restriction_is_bounded_by_infinite() -> None:
    _, network, _ = case(0, forbidden=0.0)
    search = PriceSearch(replace(network, unary=[np.full_like(costs, INFINITE) for costs in network.unary]))
    search.learn(minimise_here(search.next_network(), (), INFINITE, NO_BACKTRACK_LIMIT, 0))
    assert search.settled and search.lower_bound >= INFINITE
