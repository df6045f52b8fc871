"""The ordered pass list: trace → `PASSES` (stages and placements, equal graphs, SOAP), verified after each → emit.

Each candidate (a graph, a logical mesh, stages) is scored by the one simulator; the fastest that fits wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.arguments import check_arguments
from autopar.by_hand import template_of_graph
from autopar.clock import interrupts_caught
from autopar.collector import without_collector
from autopar.contexts import by_price, for_sequences, with_contexts
from autopar.copied import COPIES, check_goes_alone, copies_of, in_fewer_bits, one_copy, under_algorithm, with_copies
from autopar.cost.memory import optimizer_of
from autopar.driver import Context, search
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.ir.algorithm import PIPEDREAM, Algorithm, parse_algorithm, split_copies
from autopar.ir.constraint import Constraint, require_matches
from autopar.ir.faults import faults_told
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, checked
from autopar.ir.plan import Plan
from autopar.ir.routing import Routing
from autopar.margin import in_and_out_of_margin
from autopar.microbatch import check_plan
from autopar.odds import with_odds
from autopar.padding import checked_filling
from autopar.passes.async_tp import async_tp
from autopar.passes.balance import balance
from autopar.passes.branch import branch
from autopar.passes.contexts import contexts
from autopar.passes.copy_out import copy_out
from autopar.passes.exchange import adapt, exchange, experts, replicate
from autopar.passes.fit import fit
from autopar.passes.in_bits import in_bits
from autopar.passes.keep import keep
from autopar.passes.kinds import kinds
from autopar.passes.place import place
from autopar.passes.refine import refine
from autopar.passes.rewrite import rewrite
from autopar.passes.rings import rings
from autopar.passes.stage import stage
from autopar.passes.template import outset, template
from autopar.planned_part import (
    IN_ONE_PIECE,
    PlannedPart,
    Structure,
    checked_part,
    require_one_piece,
    stand_in_loss,
)
from autopar.program import PlannedProgram, model_state
from autopar.progress import Ended, Report, reporting_passes
from autopar.refusal import check_host
from autopar.request import Request, SearchBudget, budget_of, memory_limit_of
from autopar.rewrites import graph_of, under_routing, with_causal_attention
from autopar.running import checked_runs, running
from autopar.shapes import under_plan
from autopar.simulate import Timeline, predict
from autopar.step import met, simulated_again, simulated_step, with_simulator
from autopar.template import (
    check_context,
    check_gradients,
    check_hsdp,
    check_offload,
    longest_sequence,
    template_axes,
    template_ranks,
)
from autopar.trace import gradient_error, held_against_eager, is_inexact, trace, with_loss
from autopar.tunables import LONG_SEQUENCE

PASSES = (
    outset,  # a graph → on many devices, templates of one stage that people run, which bound the rest
    stage,  # a graph → plans of stages on equal submeshes: placements by ILP, layers by dynamic programming   Alpa
    place,  # a graph → plans of one stage on every logical mesh, ZeRO storage and recomputation among them    Alpa
    balance,  # a graph → on unequal devices, shares of each batch by speed
    kinds,  # a graph → on unequal devices, stages of one kind each
    contexts,  # a graph of long sequences → templates that split them; where memory binds, a graph that may
    experts,  # a graph → templates whose ranks share experts, where they are faster or nothing else fits     TUTEL
    keep,  # a graph → on unequal devices, the best plan with fewer blocks computed again, stage by stage
    fit,  # a graph of which nothing fits → the plan of least memory, or the limit that would do
    template,  # the best plan → templates that people run, where they are faster
    rewrite,  # the best plan → graphs equal to the model's, to be planned near it                       TASO, Unity
    rings,  # the best plan that splits sequences → keys gathered or passed around, whichever is faster
    async_tp,  # the best plan → its products beside what is sent around them, where it is faster          ASPLOS'23
    exchange,  # the best plan → its tokens sent to experts in chunks, beside these, where it is faster       TUTEL
    replicate,  # the best plan → the experts that most tokens choose on every rank, where some are busy  FasterMoE
    adapt,  # the best plan → its tokens sent as the load of the moment asks for, where loads differ         TUTEL
    branch,  # the best plan → operators side by side, where they are faster
    refine,  # the best plan → what MCMC finds around it                                                    FlexFlow
    in_bits,  # where memory binds, places and the best plan → operators that keep bits for their backward pass    Gist
    copy_out,  # where that is allowed, places and the best plan → blocks whose activations wait on the host    ZeRO-R
)
"""What finds plans: each takes the front and what was asked, and yields candidates (`autopar.driver`)."""

_COMPUTE_DTYPES = {None: None, "bf16": torch.bfloat16}
_NOT_ASKED = "no, check=False was asked for"


@faults_told()
@without_collector()
def parallelize(
    model: nn.Module,
    mesh: Mesh,
    example_inputs: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mode: str = "train",
    optimizer: str | None = "adamw",
    precision: str | None = None,
    memory_limit: int | None = None,
    constraints: Sequence[Constraint] = (),
    allow: Sequence[str] = (),
    routing: Routing | None = None,
    plan: Plan | None = None,
    search: str | SearchBudget = "default",
    progress: Report | None = None,
    check: bool = True,
    shapes: Sequence[Any] = (),
    pad: Mapping[str, float] | None = None,
    part: bool = False,
    runs: str = "eager",
    algorithm: str | None = None,
) -> PlannedProgram:
    """Turns a single-device model into the fastest sharded program for a mesh that the search finds.

    example_inputs: one global batch (real or meta tensors). memory_limit: bytes a device. allow: options that are taken
    by name only: "offload" lets a plan keep on the host what a device does not hold, by its price; "compression" lets
    it sum gradients in 8 bits where that is faster (`algorithm="int8"`), which is not what one device computes.
    routing: how tokens choose experts, balanced where it is not said; time is then a mean, with its 99th percentile
    beside it, and memory that of the 99th percentile. plan: a saved plan, used after validation instead of a search;
    its mode is taken too, and its routing, unless another is given, under which it is predicted anew. check: whether
    the traced graph is run beside the model where it has real weights, once for each graph of a model; the plan says
    what came of it, and a difference is a TraceError. shapes: further shapes of inputs that the program runs under the
    same placements, such as a short last batch and bucketed lengths: each as example_inputs, with tuples of lengths for
    tensors; what it leaves out is as there. One that the plan does not hold for is a PlanError. pad: by input, the
    value of rows that count for nothing, such as {"labels": -100}: batches of fewer rows are filled up with such; a
    PlanError where that changes the loss or a gradient. part: the model is a part of one, such as a tower, that a loop
    of the user's own calls as a module: its forward returns any tensors, and `program.build()` a module whose outputs
    and inputs have gradients (`runtime.part`). Of one stage, in one microbatch. runs: "eager", "compiled" (train.py
    calls `rank.compile()`), or "either": the one that is predicted to be faster; a plan that is given says it itself.
    algorithm: trains copies of the parameters that meet otherwise than by the sum of their gradients, and so not as one
    device does: "local_sgd(8)", "local_sgd(8, after=100)", "adasum" or "backup(1)" (`ir.algorithm`), each with
    copies=N, by default one a node, or one a device of one node. A copy is planned for its devices and its part of the
    batch. Ctrl-C ends a search with the best plan so far. Raises AutoparError subclasses; InfeasibleError when nothing
    fits.
    """
    check_arguments(
        model=model, loss_fn=loss_fn, optimizer=optimizer, precision=precision, constraints=constraints,
        progress=progress, allow=allow, routing=routing, **({} if plan is None else {"plan": plan}),
    )  # fmt: skip
    mesh, ended = checked(mesh), reporting_passes(progress)
    memory_limit_of(memory_limit)  # refused before the model is traced
    optimizer_of(optimizer)
    checked_runs(runs)
    wanted, num_copies = split_copies(algorithm)
    if wanted is not None:
        if parse_algorithm(wanted, COPIES).name == PIPEDREAM:
            raise PlanError(f"expected a plan by hand for {PIPEDREAM}, whose stages are given, found a search; give "
                            'plan=autopar.template_plan(…, pp=4, microbatches=8, algorithm="pipedream")')  # fmt: skip
        check_goes_alone(algorithm, {"plan": plan, "part": part or None, "pad": pad, "shapes": shapes or None})
    if part:
        loss_fn, constraints = (
            stand_in_loss(loss_fn, mode, {"shapes": shapes, "pad": pad}),
            (*constraints, *IN_ONE_PIECE),
        )
    given = model, example_inputs, loss_fn, mode if plan is None else plan.mode, _precision(precision, plan)
    graph = _trace(*given)
    against_eager = _checked_against_eager(graph, *given) if check else _NOT_ASKED
    graph = _trace(*given, is_part=True) if part else graph
    ended("trace", f"{len(graph.nodes):,} operators, checked against eager: {against_eager}")
    if plan is None:
        require_matches(constraints, graph)
        limit, budget = memory_limit_of(memory_limit), budget_of(search)
        request = Request(mesh, mode, optimizer, limit, tuple(constraints), budget, precision, allow=tuple(allow))
        with interrupts_caught():
            graph, steps = under_routing(graph, routing, optimizer)
            if wanted is None:
                graph, plan = planned_jointly(graph, request, progress, ended)
            else:
                graph, plan = planned_in_copies(graph, request, parse_algorithm(wanted, COPIES), num_copies, progress)
        plan = replace(plan, allow=request.allow, routing=routing, substitutions=(*steps, *plan.substitutions))
        plan = running(plan, graph, runs, limit)
        plan = in_fewer_bits(graph, plan) if "compression" in allow else plan
        plan = _with_error(plan, graph, model, example_inputs, loss_fn, precision)
    elif str(plan.mesh) != str(mesh):
        raise PlanError(f"expected a plan for {mesh}, found one for {plan.mesh}; plan again for this mesh")
    else:
        graph, plan = _under(routing, plan, graph)
    check_plan(graph, plan)
    check_host(plan)
    others = under_plan(plan, example_inputs, shapes, partial(_traced_as, given, check))
    filling = checked_filling(pad, graph, model, example_inputs, loss_fn) if pad is not None else {}
    source = emit(graph, plan, others, filling)
    ended("emit", f"{source.count(chr(10)):,} lines")
    graph = replace(graph)  # whoever keeps the program keeps nothing of what the search has found out about it
    plan = replace(with_simulator(plan, graph), checked_against_eager=against_eager)
    if part:
        return PlannedPart(graph, checked_part(plan), source, model_state(model), Structure.of(model, example_inputs))
    return PlannedProgram(graph, plan, source, model_state(with_loss(model, loss_fn)), others, filling)


def _traced_as(given: tuple[Any, ...], check: bool, example_inputs: Any) -> Graph:
    """The graph of a model on other inputs, held against it."""
    model, _, *rest = given
    graph = _trace(model, example_inputs, *rest)
    if check:
        _checked_against_eager(graph, model, example_inputs, *rest)
    return graph


def _under(routing: Routing | None, plan: Plan, graph: Graph) -> tuple[Graph, Plan]:
    """A plan that is given, and its graph; predicted anew where another routing is given than it was made for."""
    if routing is None or routing == plan.routing:
        return graph_of(plan, graph), plan
    plan = replace(plan, routing=routing)
    graph = graph_of(plan, graph)
    check_plan(graph, plan)
    return graph, with_odds(met(graph, replace(plan, predicted=predict(simulated_step(graph, plan)))), graph)


@without_collector()
def planned_jointly(
    graph: Graph, request: Request, progress: Report | None = None, ended: Ended | None = None
) -> tuple[Graph, Plan]:
    """The fastest plan that fits over the graphs that substitutions make of a traced model, with the graph it is for.

    Raises like `parallelize`.
    """
    graph, causal = with_causal_attention(graph, request.constraints)
    graph, told, rules = with_contexts(graph, request.constraints)
    request = replace(request, constraints=(*request.constraints, *rules))
    if not told and request.mesh.is_homogeneous and longest_sequence(graph) >= LONG_SEQUENCE:
        graph, told = for_sequences(graph)
        graph, ways = by_price(graph, request)
        told = (*told, *ways)
    own = graph
    graph, plan = in_and_out_of_margin(
        request, lambda asked: search(PASSES, own, Context(asked, progress, ended or reporting_passes(progress)))
    )
    return graph, replace(plan, substitutions=(*causal, *told, *plan.substitutions))


def planned_in_copies(
    graph: Graph, request: Request, algorithm: Algorithm, count: int | None = None, progress: Report | None = None
) -> tuple[Graph, Plan]:  # fmt: skip
    """A plan of copies that meet by an algorithm, with the graph it is for: the fastest that fits of one copy, on its
    devices and its part of the batch, for each. count: of copies. Raises like `parallelize`."""
    graph, causal = with_causal_attention(graph, request.constraints)
    mesh, count = request.mesh, count or copies_of(request.mesh)
    own = one_copy(graph, mesh, count, algorithm)
    rules, part = (*request.constraints, Constraint(stages=1)), mesh.part(range(mesh.num_devices // count))
    plan = planned(own, replace(request, mesh=part, constraints=rules, allow=()), progress)  # nothing on the host
    plan = simulated_again(with_copies(graph, plan, mesh, count, algorithm), graph)
    return graph, replace(with_odds(plan, graph), substitutions=causal)


def planned(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model as it is. Raises like `parallelize`."""
    budget = replace(request.budget, substitutions=False)
    passes = [one for one in PASSES if one not in (contexts, exchange, replicate, adapt)]
    context = Context(replace(request, budget=budget), progress, reporting_passes(progress))
    return search(passes, graph, context)[1]


@without_collector()
def placed(graph: Graph, request: Request, progress: Report | None = None) -> Plan:
    """The fastest plan that fits of a traced model by placements and stages alone. Raises like `parallelize`."""
    return search((stage, place, balance, kinds, keep, fit), graph, Context(request, progress))[1]


@faults_told()
@without_collector()
def template_plan(
    model: nn.Module, mesh: Mesh, example_inputs: Any, *, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1,
    schedule: str = "1f1b", chunks: int = 2, layers: Sequence[int] | None = None, sequence_parallel: bool = False,
    zero: int = 0, hsdp: int = 1, cp: int = 1, context: str = "gather", ep: int = 1, exchange: str = "flat",
    exchange_chunks: int = 1, experts: str = "whole", replicas: int = 0, recompute: str = "none", offload: str = "none",
    split: str = "equal", gradients: str = "sums", async_tp: bool = False, algorithm: str | None = None,
    loss_fn: Callable[..., Any] | None = None, mode: str = "train",
    optimizer: str | None = "adamw", precision: str | None = None, memory_limit: int | None = None,
    routing: Routing | None = None, check: bool = True, part: bool = False,
) -> Plan:  # fmt: skip
    """The plan that people write by hand for dp × cp × tp × pp devices, as constraints around which the rest is solved.

    pp: stages of repeated blocks, the embedding with the first, head and loss with the last, each on neighbouring ranks
    of one kind. split: "equal" gives each as many blocks, or where that is not possible, as many as leave the busiest
    least to do; "speed" as many as keep the slowest stage fast while all fit. layers: gives each stage its number of
    blocks, in the order in which they run; none in the first or the last has the embedding, or the head, by itself.
    Of pp=1 on devices of several kinds, split says in the same way how many rows of a batch each rank of dp gets.
    schedule: "gpipe" (all forward, then all backward), "1f1b" (as few microbatches in flight as
    keep the stages busy), "interleaved" (1f1b with `chunks` stages a submesh, in turn), "zero_bubble" (1f1b whose
    gradients of parameters are made later than those that earlier stages wait for), "interleaved_zero_bubble" (both),
    "zero_bubble_v" (two stages a submesh, the second ones from the last submesh to the first) or "dualpipev" (the same,
    with most backward passes in one part). microbatches: the global batch is cut into so many, each split over dp.
    zero: what data-parallel ranks hold in shards (ZeRO 0 to 3); hsdp: among how many neighbours of them, which divides
    dp, with a copy for each such group: gradients are reduce-scattered inside and all-reduced across. 1: among all. Of
    zero=0, every rank has a copy, and gradients are summed by levels where that is faster: reduce-scattered inside,
    all-reduced across, all-gathered inside.
    cp: among how many ranks sequences are split (context parallelism): what is made of positions, which are dim 1 of
    inputs, losses too. context: how attention runs then. "gather": queries stay, keys and values come from all ranks
    inside of each attention operator, again for its backward pass; "ring": they pass from rank to rank while the block
    at hand is computed, so that none has all of them; "heads": an all-to-all before and after it, so that
    each rank has some heads of the whole sequence (Ulysses). Parameters are sharded over dp and cp where zero says so.
    ep: among how many ranks the experts of each layer are split (expert parallelism): a divisor of dp, whose neighbours
    they are, or dp times cp, tp or both. Tokens stay on their ranks; their choices go to the experts and come back, in
    `exchange_chunks` parts (1 to 8) of which one travels while another is computed. exchange: "flat" sends to each rank
    at once; "two-level" along the ranks of a node first, then across nodes; "adaptive" one
    of both, in as many parts, as a table says that is priced for the plan, by the rows of the busiest rank, which all
    ranks see when they run. Over tp, use sequence_parallel.
    experts: what the ranks of dp that have the same experts, dp / ep of them, have of each. "whole": all; "tensor": a
    slice of its hidden values, to which all of these ranks send their rows; "data": the same slice, which is gathered
    for a rank's own rows (expert-tensor and expert-data parallelism); "adaptive": one of both, as a table says that is
    priced for the plan, by the rows of the busiest of these ranks. What is stored stays where it is.
    replicas: of how many experts, in each layer those that most tokens choose at the moment, every rank of ep computes
    its own tokens' choices: their parameters go to all of these ranks, and gradients home. It goes with experts="whole"
    and a fixed exchange.
    recompute: "none" keeps what autograd saves; "full" keeps of each repeated block what enters it, and runs it again
    before its backward pass, collectives included (Megatron's full recomputation); "block" does so for the innermost
    modules around each block's attention operator alone; "selective" for operators that are cheap for the memory that
    this frees, such as norms and activations.
    offload: what is kept on the host: "none", "optimizer" (what is stored of parameters, their gradients and optimizer
    state, which is updated there), "activations" (what autograd saves in each repeated block, brought back for its
    backward pass) or "both". algorithm: how the copies of dp (with hsdp, of its groups) meet, where that is not by the
    sum of their gradients: "local_sgd(8)", "local_sgd(8, after=100)", "adasum" or "backup(1)" (`ir.algorithm`);
    or "pipedream", of pp stages that update their weights after each microbatch (`ops.pipedream`).
    gradients: "sums" adds up those of each parameter over dp; "factors" gathers, for linear operators where that is
    less, the rows of their inputs and of their results' gradients, of which each rank makes the whole gradient itself.
    async_tp: with sequence_parallel, rows travel around products block by block, each beside the product of another
    (asynchronous tensor parallelism), and what was gathered is not kept for the backward pass.
    routing, check, part: as in `parallelize`.
    """
    check_arguments(
        model=model, loss_fn=loss_fn, optimizer=optimizer, precision=precision, dp=dp, tp=tp, pp=pp, zero=zero,
        hsdp=hsdp, cp=cp, ep=ep, microbatches=microbatches, chunks=chunks, layers=layers, routing=routing,
    )  # fmt: skip
    template_axes(checked(mesh), dp, tp, pp, hsdp, cp, ep, exchange)  # refused before the model is traced
    check_hsdp(mesh, pp, hsdp)
    check_context(mesh, cp, context)
    check_gradients(gradients, pp, mesh.is_homogeneous)
    check_offload(offload, mode, mesh, optimizer)
    template_ranks(mesh, pp, chunks, schedule)
    meets = None if algorithm is None else parse_algorithm(algorithm, "dp")
    if meets is not None:
        check_goes_alone(algorithm, {"part": part or None, "gradients": None if gradients == "sums" else gradients})
    if part:
        loss_fn = stand_in_loss(loss_fn, mode, {})
        require_one_piece(pp, microbatches)
    given = model, example_inputs, loss_fn, mode, _precision(precision)
    graph = _trace(*given)
    against_eager = _checked_against_eager(graph, *given) if check else _NOT_ASKED
    graph = _trace(*given, is_part=True) if part else graph
    graph, steps = under_routing(graph, routing, optimizer)
    graph, causal = with_causal_attention(graph, ())
    plan = template_of_graph(
        graph, mesh, dp=dp, tp=tp, pp=pp,
        microbatches=microbatches, schedule=schedule, chunks=chunks, layers=layers, sequence_parallel=sequence_parallel,
        zero=zero, hsdp=hsdp, cp=cp, context=context, ep=ep, exchange=exchange, exchange_chunks=exchange_chunks,
        experts=experts, replicas=replicas, recompute=recompute, offload=offload, split=split, gradients=gradients,
        async_tp=async_tp, mode=mode,
        optimizer=optimizer, precision=precision, memory_limit=memory_limit,
    )  # fmt: skip
    if meets is not None:
        plan = under_algorithm(graph, plan, meets)
        plan = _with_error(plan, graph, model, example_inputs, loss_fn, precision)
    steps += (*causal, *plan.substitutions)
    return replace(plan, routing=routing, substitutions=steps, checked_against_eager=against_eager)


@faults_told()
def verify(plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None) -> None:
    """Type-checks a plan against a model. Raises PlanError or PlacementError with node and source line."""
    _verified_graph(plan, model, example_inputs, loss_fn)


@faults_told()
def played(
    plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None
) -> tuple[Plan, Timeline]:
    """A plan that was read from a file, predicted anew, and its simulated step. Raises like `verify`."""
    graph = _verified_graph(plan, model, example_inputs, loss_fn)
    timeline = simulated_step(graph, plan)
    return with_odds(met(graph, replace(plan, predicted=predict(timeline))), graph), timeline


@faults_told()
def with_timeline(
    plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None
) -> Plan:
    """A plan that was read from a file, with what `plan.timeline()` needs of the model. Raises like `verify`."""
    return with_simulator(plan, _verified_graph(plan, model, example_inputs, loss_fn))


def graph_for(
    plan: Plan, model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None
) -> Graph:  # fmt: skip
    """The graph that a plan is for, with its substitutions made. Raises like `verify`."""
    return _verified_graph(plan, model, example_inputs, loss_fn)


def _verified_graph(plan: Plan, model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None) -> Graph:
    """The graph that a plan is for, which it fits."""
    check_arguments(plan=plan, model=model, loss_fn=loss_fn)
    graph = graph_of(plan, _trace(model, example_inputs, loss_fn, plan.mode, _precision(plan.precision)))
    check_plan(graph, plan)
    return graph


def traced(
    model: nn.Module, example_inputs: Any, loss_fn: Callable[..., Any] | None, precision: str | None, check: bool
) -> tuple[Graph, str]:  # fmt: skip
    """The graph of a model that is trained, and what came of running it beside the model. Raises TraceError."""
    given = model, example_inputs, loss_fn, "train", _precision(precision)
    graph = _trace(*given)
    return graph, _checked_against_eager(graph, *given) if check else _NOT_ASKED


def _trace(
    model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str, precision: str | None, *, is_part: bool = False
) -> Graph:  # fmt: skip
    if mode not in ("train", "inference"):
        raise PlanError(f'expected mode="train" or "inference", found {mode!r}')
    if example_inputs is None:
        raise PlanError("expected example_inputs (one global batch; meta tensors will do), found None")
    return trace(
        model, example_inputs, loss_fn=loss_fn, mode=mode, compute_dtype=_COMPUTE_DTYPES[precision], is_part=is_part
    )


def _checked_against_eager(
    graph: Graph, model: nn.Module, example_inputs: Any, loss_fn: Any, mode: str, precision: str | None
) -> str:
    """What a plan says of it. Raises TraceError where graph and model differ."""
    return held_against_eager(model, graph, example_inputs, loss_fn, _COMPUTE_DTYPES[precision])


def _with_error(
    plan: Plan, graph: Graph, model: nn.Module, example_inputs: Any, loss_fn: Any, precision: str | None
) -> Plan:  # fmt: skip
    """A plan that is inexact, with how far its gradients are off."""
    if not is_inexact(plan):
        return plan
    error = gradient_error(plan, graph, model, example_inputs, loss_fn, _COMPUTE_DTYPES[precision])
    return replace(plan, gradient_error=error)


def _precision(precision: str | None, plan: Plan | None = None) -> str | None:
    """The precision asked for, or that of a plan that is given."""
    if precision not in _COMPUTE_DTYPES:
        raise PlanError(f'expected precision=None (as the model is) or "bf16", found {precision!r}')
    if plan is None:
        return precision
    if precision is not None and precision != plan.precision:
        raise PlanError(
            f"expected precision={plan.precision!r}, which the plan is for, found {precision!r}; plan again"
        )
    return _precision(plan.precision)
