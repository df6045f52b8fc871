"""Nothing that verifies is ever wrong: every mutant of every plan is refused, or still computes what the model does.

The tests take a sixth of the pairs of a model and a plan, in which every model and every plan is in turn;
`python -m tests.equivalence.test_mutations` proves them all, or those of the models that it is given. All
redistributions of a plan are mutated, one by one (`mutations.py`), those of repeated blocks included. Mutants that
verify and do not meet run together in one program; each alone only when that program is wrong. So equal blocks cost no
further runs, and no argument from symmetry is needed. Plans are of one stage.
"""

from __future__ import annotations

import itertools
import re
import sys
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.emit import emit
from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import Placement
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.ops import admits
from autopar.rewrites import graph_of
from tests.equivalence import planned, zoo
from tests.equivalence.harness import run_single
from tests.equivalence.mutants import Case, prove
from tests.equivalence.mutations import drop_for_readers, mutations, sites
from tests.rank_pool import pool
from tests.traced import traced_once

PLANS = ("dp", "zero1", "zero2", "zero3", "tp", "tp_sequence", "dp_tp", "zero3_tp", planned.ONE_STAGE)
NAMES_NODE_AND_LINE = re.compile(r"node \S+ \(\S+\) at \S+:\d+")


@cache
def model_part(model_name: str) -> dict[str, Any]:
    """What the cases of a model share."""
    model, batch = zoo.build(model_name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return {"state": state, "batch": batch, "single": run_single(model, batch, ())}


def case(model_name: str, plan_name: str) -> Case:
    plan = planned.plan(model_name, plan_name)
    return Case(graph_of(plan, planned.graph(model_name)), plan, **model_part(model_name))


class Verifier:
    """The verifier; what it asks about single operators is remembered from mutant to mutant."""

    def __init__(self) -> None:
        self.known: dict[object, str | None] = {}

    def __call__(self, graph: Graph, plan: Plan) -> None:
        check_plan(graph, plan, self.admits)

    def admits(
        self, graph: Graph, node: Node, operands: tuple[Placement, ...], results: tuple[Placement, ...],
        axes: LogicalMesh,
    ) -> str | None:  # fmt: skip
        key = (node.name, operands, results)
        if key not in self.known:
            self.known[key] = admits(graph, node, operands, results, axes)
        return self.known[key]


@pytest.mark.sampled(
    always=(
        "moe-tp",
        "hf_llama-dp",
        "hf_bert-zero2",
        "hf_gpt2-zero3",
        "gpt-zero1",
        "gpt-tp_sequence",
        "mlp-dp_tp",
        "mlp-zero3_tp",
        "mlp-searched_one_stage",
    )
)
@pytest.mark.ranks
@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("model_name", zoo.NAMES)
def test_what_verifies_computes_what_the_model_computes(model_name: str, plan_name: str) -> None:
    prove_plan(model_name, plan_name)


def prove_plan(model_name: str, plan_name: str) -> None:
    """All mutants of a plan."""
    proved = case(model_name, plan_name)
    tally = prove(proved, mutations(proved.graph, proved.plan), pool(proved.plan.mesh.num_devices), Verifier())
    print(f"\n{model_name}, {plan_name}, {len(proved.plan.stage.redistributes)} redistributions: {tally}")
    assert not tally.wrong, "\n\n".join(tally.wrong)
    assert tally.refused and tally.equal
    silent = [str(error) for _, error in tally.refused if not NAMES_NODE_AND_LINE.search(str(error))]
    assert not silent, f"{len(silent)} refusals that do not say where:\n" + "\n".join(silent[:5])


@pytest.mark.ranks
@pytest.mark.parametrize(("plan_name", "change"), [("dp", "I -> R"), ("tp", "P -> I"), ("zero1", "S(0) -> R")])
def test_a_verifier_that_accepts_everything_is_found_out(plan_name: str, change: str) -> None:
    """Readers that take a tensor without its redistribution: refused; and each, let through, is seen to be wrong."""
    proved = case("mlp", plan_name)
    planted = [
        mutation
        for site in sites(proved.graph, proved.plan)
        if change in str(site) and site.readers
        for mutation in drop_for_readers(site)
    ]
    refused = prove(proved, planted, pool(2), Verifier())
    assert planted and len(refused.refused) == len(planted)
    let_through = prove(proved, planted[:1], pool(2), lambda graph, plan: None)
    assert len(let_through.wrong) == 1 and let_through.equal == 0


@pytest.mark.ranks
def test_a_wrong_mutant_is_found_among_others() -> None:
    """Many mutants run as one program, yet the one that is wrong is named."""
    proved = case("mlp", "dp")
    first = next(site for site in sites(proved.graph, proved.plan) if "weight" in str(site))
    planted = next(drop_for_readers(first))
    reach = planted.reach(proved.graph, proved.plan)
    others = mutations(proved.graph, proved.plan)
    good = [mutation for mutation in others if not mutation.reach(proved.graph, proved.plan).meets(reach)]
    verify = Verifier()

    def lenient(graph: Graph, plan: Plan) -> None:
        """The verifier, but for the node that the planted mutant changes."""
        name = next(iter(planted.nodes))
        if plan.stage.nodes[name] != planted.nodes[name]:
            verify(graph, plan)

    tally = prove(proved, [planted, *good[:200]], pool(2), lenient)
    assert len(tally.wrong) == 1 and tally.wrong[0].startswith(planted.what)


@pytest.mark.sweep
def test_the_public_ways_refuse_and_accept_alike() -> None:
    """`autopar.verify` and `autopar.parallelize(plan=...)` do what the tests above do with a graph of their own, which
    is traced once for all mutants."""
    with traced_once():
        _held_to_the_public_ways()


def _held_to_the_public_ways() -> None:
    model, batch = zoo.build("mlp")
    plan = planned.plan("mlp", "tp")
    graph = planned.graph("mlp")
    verify, kinds = Verifier(), set()
    for mutation in mutations(graph, plan)[::40]:
        mutant = mutation.apply(plan)
        try:
            verify(graph, mutant)
        except (PlanError, PlacementError) as error:
            kinds.add("refused")
            for public in (
                lambda mutant=mutant: autopar.verify(mutant, model, batch),
                lambda mutant=mutant: autopar.parallelize(model, plan.mesh, batch, plan=mutant),
            ):
                with pytest.raises(type(error), match=re.escape(str(error))):
                    public()
        else:
            kinds.add("accepted")
            autopar.verify(mutant, model, batch)
            assert autopar.parallelize(model, plan.mesh, batch, plan=mutant).source == emit(graph, mutant)
    assert kinds == {"refused", "accepted"}


if __name__ == "__main__":
    for pair in itertools.product(sys.argv[1:] or zoo.NAMES, PLANS):
        prove_plan(*pair)
