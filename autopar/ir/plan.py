"""The plan: which placement every tensor has on every mesh axis, how parameters are stored, and what it costs.

A plan is pure data. It says everything that the emitted program does beyond the graph: each operator's operand
and result placements, each redistribution with its steps, each parameter's storage. `microbatch.check_plan` checks it.
What shows it, and its form in a file, it asks for by name (`autopar.views`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autopar.errors import PlanError
from autopar.ir.algorithm import Algorithm
from autopar.ir.faults import faults_told
from autopar.ir.inexact import GradientError
from autopar.ir.mesh import MICROBATCH, LogicalMesh, Mesh
from autopar.ir.placement import Placement
from autopar.ir.redistribution import Step
from autopar.ir.routing import Routing
from autopar.ir.schedule import PLAIN
from autopar.ir.tried import Tried
from autopar.ir.writing import write_whole
from autopar.views import view

if TYPE_CHECKING:
    from rich.console import RenderableType


EAGER, COMPILED = "eager", "compiled"
"""How a program runs: one kernel an operator, or its blocks compiled by `rank.compile()` (`cost.fusion`)."""


@dataclass(frozen=True)
class Storage:
    """How a parameter or buffer is kept between steps, and when it is gathered (the ZeRO choice).

    `placement`: what each rank stores, I or S(d) an axis (R for what needs no gradient). ZeRO-0 stores I;
    ZeRO-1 stores S and gathers once a step; ZeRO-2 also reduces gradients each microbatch (`reduce_each_microbatch`);
    ZeRO-3 also gathers again for the backward pass (`regather`). Optimizer state follows the stored placement.
    `on_host`: what is stored, its gradient and its optimizer state are in the host's memory, where it is updated
    (ZeRO-Offload); it is brought to the device for a step, or with `regather` for each use (ZeRO-Infinity).
    """

    placement: Placement
    regather: bool = False
    reduce_each_microbatch: bool = False
    on_host: bool = False


class SimulatedLink(NamedTuple):
    """The link between device and host of ranks of which both are one memory: bytes a second from the device and to it,
    and nanoseconds a copy takes beside. The runtime delays copies to that."""

    down_bandwidth: float
    up_bandwidth: float
    copy_ns: int


@dataclass(frozen=True)
class NodePlan:
    """The placements an operator runs with: of each operand in argument order, and of each result. in_bits: it keeps
    for its backward pass a few bits of each element, which say as much (`ops.in_bits`); in_eight_bits: 8 bits of each
    activation, which say nearly as much (`ops.eight_bits`): where inexact gradients are allowed by name."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    in_bits: bool = False
    in_eight_bits: bool = False


@dataclass(frozen=True)
class Redistribute:
    """Brings `tensor` to the placement `target` for the consumers that need it there."""

    tensor: str
    target: Placement
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Breakdown:
    """Where the predicted step time goes, on the device that ends last; the parts add up to `step_time_ns`.

    exposed_communication_ns: compute stands still for a collective or a send, or for what a rank's thread does around
    a stage's pass. bubble_ns: for the work of another stage. recompute_ns: activations made again for the backward
    pass, no part of compute_ns.
    """

    compute_ns: int = 0
    recompute_ns: int = 0
    exposed_communication_ns: int = 0
    bubble_ns: int = 0
    optimizer_ns: int = 0


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a plan. Bytes of communication are per rank and step, by collective.

    Where the devices' profiles say (`autopar.odds`): step_time_interval_ns holds nine in ten steps, taken_bytes are
    what a process takes of the fullest device, beside what is allocated, needed_bytes what 98 of 100 plans so predicted
    stay below, and fits_probability is how likely it stays below tight_bytes, the part of its capacity_bytes that
    leaves the allocator the room that it works in. refilling_ns: what a step may take longer than step_time_ns since
    the device is fuller than that, so that its allocator gives memory back and asks again (`autopar.cost.device`);
    the interval's upper end has it.

    Where experts are routed, step_time_ns is the mean over routings, step_time_p99_ns what all but one in a hundred
    take at most; memory is that of the 99th percentile (`ops.loads`).

    host_bytes: what is kept on the host of the rank that has most there; None where nothing is.
    """

    step_time_ns: int = 0
    lower_bound_ns: int = 0
    peak_bytes: int = 0
    comm_bytes: Mapping[str, int] = field(default_factory=dict)
    breakdown: Breakdown = Breakdown()
    memory: Mapping[str, int] = field(default_factory=dict)  # at the peak, by kind
    step_time_interval_ns: tuple[int, int] | None = None
    taken_bytes: int | None = None
    needed_bytes: int | None = None
    capacity_bytes: int | None = None
    fits_probability: float | None = None
    step_time_p99_ns: int | None = None
    host_bytes: int | None = None
    tight_bytes: int | None = None
    refilling_ns: int | None = None


@dataclass(frozen=True)
class Move:
    """A difference between a refined plan and the one that refinement began with, for people.

    name: a node, stored tensor or input, of the first of `count` alike; kind: of proposal. gain_ns: what the step would
    take longer if this one were taken back and all others kept.
    """

    name: str
    kind: str
    count: int
    before: str
    after: str
    gain_ns: int


@dataclass(frozen=True)
class Refinement:
    """How the SOAP search by MCMC went (`autopar.soap`): one chain from each start, the best plan of all is kept.

    start: where the best plan's chain began; starts: step times in ns that the chains began and ended with. rates: by
    kind of proposal, how many were made and accepted. simulated: proposals that no lower bound had refused before.
    trace: (proposal, current step ns, best step ns), thinned; where the chains ran on few of the model's blocks, which
    stop_reason says, in proportion to the whole. Without proposals, stop_reason says why there were none.
    """

    start: str
    before_ns: int
    after_ns: int
    proposals: int
    simulated: int
    seconds: float
    seed: int
    stop_reason: str
    rates: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    starts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    trace: tuple[tuple[int, int, int], ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class GraphPlan:
    """An equal graph of the model, near which setting it was planned, and what came of it.

    rules: of the substitutions that make it, how often each was applied; none for the model's own graph. one_device_ns:
    a step of it on one device, by the profile. step_time_ns: of its fastest plan; None where none was found.
    """

    rules: Mapping[str, int]
    one_device_ns: int
    mesh: str
    stages: int
    microbatches: int
    step_time_ns: int | None
    outcome: str


@dataclass(frozen=True)
class Rewriting:
    """How equal graphs were looked for and planned, and which was taken (`autopar.passes.rewrite`).

    seen: graphs that substitutions led to; stop_reason: why the search for more ended. seconds: of all.
    """

    seen: int
    stop_reason: str
    seconds: float
    graphs: tuple[GraphPlan, ...] = ()


@dataclass(frozen=True)
class SearchReport:
    """How the plan was found: the objective, its bound, why the search stopped, and what else was looked at.

    lower_bound_ns: of the problem that was solved last, and of no other: placements on one logical mesh, how given
    placements are cut into stages, or shares of the batch. seconds: of work, as it is counted (`autopar.clock`).
    rewriting: of graphs equal to the model's, where they were looked for. refinement: what came after it, if anything
    did; cost and bound are those of before.
    """

    method: str = "given"
    cost_ns: int = 0
    lower_bound_ns: int = 0
    stop_reason: str = ""
    seconds: float = 0.0
    seed: int = 0
    tried: tuple[Tried, ...] = ()
    rewriting: Rewriting | None = None
    refinement: Refinement | None = None


@dataclass(frozen=True)
class Branch:
    """Nodes that run on the ranks of one coordinate of a fork's axis, and nowhere else."""

    coordinate: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Fork:
    """Branches that run at the same time on disjoint ranks: those of different coordinates of a mesh axis (by name).

    What they read is R on the axis, what they make P (`ir.branches`).
    """

    axis: str
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Stage:
    """What runs on a submesh: as many ranks as its axes hold, from `first_rank` on, row-major.

    A plan's stages are in the order in which a microbatch visits them; stages that share a submesh are chunks of an
    interleaved schedule. `axes` and all placements are those of the stage alone, and of one microbatch.
    inputs: what comes in, as it comes in: inputs of the model, and tensors that earlier stages made and that are sent.
    storage: by the tensor's name in the graph. A trained tensor in several stages is tied: each keeps it, and their
    gradients are summed.
    nodes: what the stage runs. A node that needs no activation (a mask of the inputs) may run in several.
    forks: operators that run on a part of the ranks alone.
    """

    first_rank: int
    axes: LogicalMesh
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    nodes: Mapping[str, NodePlan] = field(default_factory=dict)
    redistributes: tuple[Redistribute, ...] = ()
    forks: tuple[Fork, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the submesh."""
        return math.prod(axis.size for axis in self.axes if axis.name != MICROBATCH)

    @property
    def ranks(self) -> range:
        """The ranks of the submesh."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


class PlanTimeline(Protocol):
    """What `Plan.timeline` returns, as far as a plan knows of it: one simulated step (`autopar.simulate.Timeline`)."""

    @property
    def step_time_ns(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def save(self, path: str | Path) -> None:
        """Writes the timeline as a trace that Perfetto and chrome://tracing open."""

    def picture(self) -> Mapping[str, Any]:
        """The timeline as plain data that a page draws (`autopar.show.picture`)."""


class PlanComparison(Protocol):
    """What `Plan.compare` returns, as far as a plan knows of it (`autopar.observed.comparison.StepComparison`)."""

    @property
    def predicted_ns(self) -> int: ...

    @property
    def measured_ns(self) -> int: ...

    @property
    def error(self) -> float:
        """The prediction over what was measured, less 1."""


@dataclass(frozen=True)
class Substitution:
    """A rewrite of the model's graph into an equal one, made before anything was placed (`autopar.substitute`).

    rule, statement, status: of the rule file, "proved" or "tested". region: the name of the first node of the part of
    the graph that it is in; modules: where that part and its equals run. roots: the tensors that are computed in
    another way since; binding: what the rule's variables stand for. gain_ns: the profile's time saved a step on one
    device, in all of the equal parts.
    """

    rule: str
    statement: str
    status: str
    region: str
    modules: tuple[str, ...]
    roots: tuple[str, ...]
    binding: Mapping[str, Any]
    gain_ns: int = 0


def rule_counts(steps: Iterable[Substitution]) -> dict[str, int]:
    """How often each rule is applied, in all equal parts."""
    counts = Counter[str]()
    for step in steps:
        counts[step.rule] += len(step.modules)
    return dict(counts)


class Alternative(NamedTuple):
    """An option that was not chosen: how much more it costs with every other choice as it is (ns a step, bytes).

    compute_ns: the part of `extra_ns` that is the operator's own; the rest is redistribution, gathers and gradient
    synchronisation. None where a plan was simulated as a whole.
    """

    option: str
    extra_ns: int
    extra_bytes: int
    compute_ns: int | None = None


@dataclass(frozen=True)
class Choice:
    """One decision of the search, for `plan.explain`; equal blocks decide together.

    name: a node, or an input's or stored tensor's name, of the first of `count` equal blocks. `cost_ns`: the option's
    own time and that of the redistributions at it, in all of them. `alternatives`: the cheapest, best first.
    """

    name: str
    kind: str  # "node", "stored" or "input"
    count: int
    chosen: str
    cost_ns: int
    num_options: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Plan:
    """A sharding plan for one model and mesh; pure data, see the module's docstring.

    What is placed is in its stages, of which there is at least one; a plan of one has it on all ranks.
    """

    fingerprint: str
    model: str
    mesh: Mesh
    stages: tuple[Stage, ...]
    schedule: str = PLAIN  # a row of `ir.schedule`
    microbatches: int = 1
    microbatch_inputs: tuple[str, ...] = ()  # inputs whose dim 0 microbatches divide
    recompute: tuple[str, ...] = ()  # modules and operators computed again in the backward pass (`ir.recompute`)
    copied_out: tuple[str, ...] = ()  # modules whose saved activations wait in the host's memory (`ir.copied_out`)
    mode: str = "train"
    training: bool = True  # whether the model was in training mode: its dropout and batch norm are those of that mode
    optimizer: str = "adamw"
    precision: str | None = None
    runs: str = EAGER  # or COMPILED: what the prediction is of
    memory_limit: int = 0
    allow: tuple[str, ...] = ()  # options that the search might take, such as "offload", beside those it always may
    host_link: SimulatedLink | None = None  # where something may be on the host, and the link to it is simulated
    routing: Routing | None = None  # how tokens choose experts, where it was said; balanced where not
    algorithm: Algorithm | None = None  # how copies of the parameters meet, where not by summed gradients
    gradient_error: GradientError | None = None  # of plans that are inexact: how far their gradients are off
    predicted: Prediction = Prediction()
    search: SearchReport = SearchReport()
    coverage: Mapping[str, str] = field(default_factory=dict)  # operator -> "table", "registry" or why replicated
    sources: Mapping[str, str] = field(default_factory=dict)  # block of the cost profile -> "kind: source (date)"
    parameters: Mapping[str, str] = field(default_factory=dict)  # tensor's name in the graph -> name in the model
    types: Mapping[str, str] = field(default_factory=dict)  # input or stored tensor -> "float32[256, 64]"
    scopes: Mapping[str, str] = field(default_factory=dict)  # node -> "module path|operator|source line"
    choices: tuple[Choice, ...] = ()
    blocks: tuple[tuple[str, ...], ...] = ()  # equal blocks: the module paths of each distinct one
    substitutions: tuple[Substitution, ...] = ()  # in order: they make the graph that the plan is for of the model's
    #: what a file of an earlier version says on the axis of microbatches, by stage: it must follow from the graph
    told: tuple[Stage, ...] = field(default=(), compare=False, repr=False)  # not in the JSON
    #: whether the graph was seen to compute what the model does: "yes", or "no, WHY"
    checked_against_eager: str = field(default="no, it was planned from a graph", compare=False)
    simulator: Callable[[Plan], PlanTimeline] | None = field(default=None, compare=False, repr=False)  # not in the JSON

    @property
    def stage(self) -> Stage:
        """The only stage, of a plan that has one."""
        (only,) = self.stages
        return only

    def placed(self, **changes: Any) -> Plan:
        """The plan of one stage with other placements, or whatever else of its stage is given."""
        return replace(self, stages=(replace(self.stage, **changes),))

    @property
    def uses_servers(self) -> bool:
        """Whether gradients are summed over the mesh's servers."""
        return any(step.is_served for stage in self.stages for item in stage.redistributes for step in item.steps)

    @property
    def num_processes(self) -> int:
        """How many processes run the program: one a device, and one a server that sums gradients."""
        servers = self.mesh.servers if self.uses_servers else None
        return self.mesh.num_devices + (servers.count if servers is not None else 0)

    @cached_property
    def parts(self) -> tuple[StagePlan, ...]:
        """Each stage, with what the plan says of the step: a copy of it, as a cycle would outlive the search."""
        own = copy(self)
        return tuple(StagePlan(**vars(stage), plan=own) for stage in self.stages)

    def scope(self, node: str) -> tuple[str, str, str]:
        """A node's module path, operator and source line; empty where the plan does not say."""
        module, op, source = self.scopes.get(node, "||").rsplit("|", 2)
        return module, op, source

    @faults_told()
    def __str__(self) -> str:
        text: str = view("text")(self)
        return text

    @faults_told()
    def __rich__(self) -> RenderableType:
        """Tables, for `rich.print(plan)` and consoles that show objects with rich."""
        tables: RenderableType = view("tables")(self)
        return tables

    @faults_told()
    def _repr_html_(self) -> str:
        """The card that notebooks show."""
        card: str = view("card")(self)
        return card

    @faults_told()
    def to_json(self) -> str:
        """The plan as JSON text; `from_json` of it is equal, and writes the same bytes again."""
        text: str = view("to_json")(self)
        return text

    @classmethod
    @faults_told()
    def from_json(cls, text: str) -> Plan:
        """Reads and validates a plan. Raises PlanError naming what is malformed; nothing in it is executed."""
        if not isinstance(text, str):
            raise PlanError(f"expected a plan's JSON text, found {type(text).__name__}; of a file take Plan.load(path)")
        plan: Plan = view("from_json")(text)
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan's JSON, whole or not at all."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file; see `from_json`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, TypeError) as error:
            raise PlanError(f"expected a plan file at {path}, found none that can be read: {error}") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    @faults_told()
    def timeline(self) -> PlanTimeline:
        """The simulated step, event by event. Raises PlanError for a plan that was only read from a file: simulating
        needs the model's graph, which `autopar.parallelize(model, mesh, inputs, plan=plan).plan` has."""
        if self.simulator is None:
            raise PlanError(
                "expected a plan that parallelize or template_plan returned, found one read from a file, which lacks "
                "the model's graph; take autopar.parallelize(model, mesh, inputs, plan=plan).plan.timeline(), or run "
                "`autopar simulate`"
            )
        return self.simulator(self)

    @faults_told()
    def compiled(self) -> Plan:
        """The same plan of a program whose blocks are compiled (`rank.compile()`), with what is predicted of that.

        Raises PlanError for a plan that was only read from a file, as `timeline` does.
        """
        other: Plan = view("predicted_again")(replace(self, runs=COMPILED))
        return other

    @faults_told()
    def explain(self, pattern: str) -> str:
        """Why: the operators and parameters of a module path (or pattern), chosen against alternatives, with costs."""
        if not isinstance(pattern, str):
            raise PlanError(f"expected a module path or pattern, such as 'layers.0.mlp', found {pattern!r}")
        text: str = view("explanation")(self, pattern)
        return text

    @faults_told()
    def diff(self, other: Plan) -> str:
        """What differs between two plans, one line each."""
        _require(other, "another plan to compare with")
        text: str = view("difference")(self, other)
        return text

    @faults_told()
    def compare(self, trace: str | Path) -> PlanComparison:
        """What was predicted of a step beside what ran: by module and source line, and what was wrong. It prints.

        trace: the folder that `autopar run --trace` has written, or one rank's file of it. Raises TraceFileError for
        one of another plan.
        """
        found: PlanComparison = view("compare")(self, trace)
        return found

    @faults_told()
    def report(self, path: str | Path, compare: Plan | None = None, *, trace: str | Path | None = None) -> None:
        """Writes one self-contained HTML page that shows the plan, or two side by side, whole or not at all.

        The timeline, memory over time and traffic by axis are in it where the plan has its model's graph (`timeline`).
        trace: as for `compare`; what ran is then beside what was predicted of this plan.
        """
        if compare is not None:
            _require(compare, "another plan to compare with")
        view("report")(self, path, compare, None if trace is None else self.compare(trace))


def _require(value: Any, wanted: str) -> None:
    if not isinstance(value, Plan):
        raise PlanError(f"expected {wanted}, found {type(value).__name__}; of a file take Plan.load(path)")


@dataclass(frozen=True)
class StagePlan(Stage):
    """A stage, with what its plan says of the step: what is emitted as one program, and played as one."""

    plan: Plan = field(kw_only=True)

    @property
    def mesh(self) -> Mesh:
        """All devices, those of other stages too."""
        return self.plan.mesh

    @property
    def mode(self) -> str:
        """ "train" or "inference"."""
        return self.plan.mode

    @property
    def optimizer(self) -> str:
        """What keeps state for each trained tensor."""
        return self.plan.optimizer

    @property
    def microbatches(self) -> int:
        """In a step."""
        return self.plan.microbatches

    @property
    def recompute(self) -> tuple[str, ...]:
        """Modules and operators that are computed again in the backward pass."""
        return self.plan.recompute

    @property
    def copied_out(self) -> tuple[str, ...]:
        """Modules whose saved activations wait in the host's memory for the backward pass."""
        return self.plan.copied_out

    @property
    def schedule(self) -> str:
        """The order of passes, a row of `ir.schedule`."""
        return self.plan.schedule

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Equal blocks: the module paths of each distinct one, in all stages."""
        return self.plan.blocks
