"""PipeDream's asynchronous pipeline: each stage updates its weights after every microbatch's backward pass, and keeps
the version that the forward pass of a microbatch read until the backward pass of that microbatch has read it as well.

On stage s of P, which makes its passes in the order of 1F1B, microbatch m of a step is computed with the weights after
max(0, m + 1 − (P − s)) updates of the step; its gradient is applied to the latest. So microbatches are minibatches of
their own: the gradient of one is that of the mean over its samples, as far as microbatches count alike. The pipeline
runs empty at the end of each step, so that what a program returns and saves is of one version.

Source: Narayanan et al., SOSP'19 (doi:10.1145/3341301.3359646), section 3.3, weight stashing; without vertical sync.
"""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.offload import stored_on_host
from autopar.ir.plan import COMPILED, Plan, Stage
from autopar.ir.schedule import PLAIN

_REMEDY = 'template_plan(…, pp=4, microbatches=8, algorithm="pipedream") makes one'


def check_pipedream(graph: Graph, plan: Plan) -> None:
    """Raises PlanError for a plan whose stages do not update their weights by themselves.

    graph: of one microbatch.
    """

    def refused(what: str, found: str) -> PlanError:
        return PlanError(f"expected {what} with {plan.algorithm}, found {found}; {_REMEDY}")

    if plan.mode != "train":
        raise refused("a plan that trains", f"one for {plan.mode}")
    if len(plan.stages) < 2 or plan.schedule != PLAIN:
        raise refused(f"several stages in the order of {PLAIN}", f"{len(plan.stages)} of {plan.schedule}")
    if len({stage.first_rank for stage in plan.stages}) < len(plan.stages) or any(s.num_ranks > 1 for s in plan.stages):
        raise refused("a device for each stage", "stages of several, or several of one")
    if plan.precision is not None or plan.runs == COMPILED or graph.kept_dtypes:
        raise refused("weights that operators read as they are stored", "other precision, or compiled blocks")
    if any(map(stored_on_host, plan.stages)):
        raise refused("weights on the device", "some on the host")
    if graph.mutations:
        raise refused(
            "a forward pass that changes nothing that is stored", f"one that sets {next(iter(graph.mutations))}"
        )
    trained = {item.tensor for item in graph.parameters if item.requires_grad}
    stored = [name for stage in plan.stages for name in stage.storage if name in trained]
    if tied := next((name for name in stored if stored.count(name) > 1), None):
        raise refused("parameters of one stage each", f"{graph.stored_by_tensor[tied].name} in several")


def versions(plan: Plan, position: int) -> int:
    """How many versions of its weights a stage keeps at most, beside the latest."""
    return min(plan.microbatches, len(plan.stages) - position)


def weight_bytes(graph: Graph, stage: Stage) -> int:
    """Of the weights that a stage of one device trains."""
    trained = {item.tensor for item in graph.parameters if item.requires_grad}
    return sum(graph.kept(name).num_bytes for name in stage.storage if name in trained)
