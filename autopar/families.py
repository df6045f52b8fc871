"""Templates of one stage that people run, of a graph: those that fit and may be faster than a plan.

    dp × tp, tp inside a node             → a problem on a short graph (`interop.fold`): least time, least memory
    dp × cp × tp, of long sequences       → the same of a graph whose sequences may be split
    ep of dp, flat or in two levels       → the same, with ranks that share the experts; in as many chunks as cost least
    what may be faster, and may fit       → placed on the whole model, played by layers (`simulate.Incremental`)
    what differs from the fastest in one thing → the same, as long as that gains something

A step takes no less than its operators and what is between them; what stored tensors are gathered and reduced for may
hide behind that. Both bounds serve every ZeRO stage, and every number of microbatches: activations take a part of the
memory each, the rest all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import NamedTuple

from autopar.clock import is_interrupted
from autopar.collector import cached_method
from autopar.cost.exchanges import chunks_where_shared
from autopar.errors import AutoparError, InfeasibleError
from autopar.expert_parallel import expert_axes
from autopar.interop import block_layers, fold
from autopar.interop.submeshes import divisors
from autopar.ir.exchange_table import EXCHANGES
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.outline import Outline
from autopar.ir.placement import Type
from autopar.ir.plan import Plan
from autopar.ir.structure import batch_inputs
from autopar.ir.tried import Tried
from autopar.microbatch import batch_types, divisible
from autopar.planning import DividedGraph, divided
from autopar.profiler import profile_of
from autopar.request import Request
from autopar.short_places import QUICK_BUDGET, QUICK_SOLVE, KnownTemplate, ShortPlace, fitted
from autopar.simulate import Incremental
from autopar.substitute.exchanges import in_chunks, routed
from autopar.template import DATA, positions, template_axes, template_constraints, template_recompute
from autopar.trace import find_blocks
from autopar.tunables import (
    ALIKE,
    BESIDE_KNOWN,
    EXPOSED,
    FIRST_COUNT,
    INSTEAD_AGAIN,
    LEAST_GAIN,
    LESS_EACH,
    MOST_AXES,
    MOST_EXPLAINED,
    NEAR_SHARDED,
    TEMPLATE_TRIES,
    USAGE_BELOW,
)
from autopar.zero import Groups, joined, recomputable

_MANY = _ANY = 2**62


@dataclass(frozen=True)
class Template:
    """What `template_plan` is asked for."""

    dp: int = 1
    tp: int = 1
    zero: int = 0
    recompute: str = "none"
    microbatches: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    context: str = "gather"
    ep: int = 1
    exchange: str = "flat"
    exchange_chunks: int = 1
    hsdp: int = 1

    def __str__(self) -> str:
        said = (
            (item.name, getattr(self, item.name)) for item in fields(self) if getattr(self, item.name) != item.default
        )
        return ", ".join(f"{name}={value}" for name, value in said)


class _BlockRecomputation(NamedTuple):
    """To compute blocks again. least_ns: what a step takes so by estimate. first: how many of the groups are tried at
    first; saved: what all save in bytes; own_ns: what each costs; without_ns: what a step takes at least without;
    sending_ns: at least, for what it sends."""

    least_ns: int
    template: Template
    groups: Groups
    first: int
    saved: int
    own_ns: int
    without_ns: int
    sending_ns: int

    @property
    def bound_ns(self) -> int:
        """What a step takes at least where all that is gathered and reduced hides as far as it can."""
        return max(self.sending_ns, self.without_ns + self.first * self.own_ns)


class Family:
    """The templates for a graph, each looked at once, and the fastest plan so far."""

    def __init__(
        self, graph: Graph, plan: Plan | None, request: Request, likely_ns: float = math.inf,
        least_of_tp: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        """plan: what was found so far, if anything. likely_ns: what a plan takes by estimate that may be found yet.
        least_of_tp: what a step takes at least on so many ranks of tp, in few samples a microbatch, where known."""
        self.least_of_tp = least_of_tp or {}
        self.graph, self.request = graph, replace(request, budget=QUICK_BUDGET)
        self.is_tight = plan is not None and (plan.microbatches > 1 or bool(plan.recompute))
        self.profile = profile_of(request.mesh)
        self.blocks = find_blocks(graph, request.constraints)
        self.paths = tuple(path for group in self.blocks.paths for path in group)
        self.folded = fold(graph, self.blocks, block_layers(graph, self.paths))
        self.shared = self.profile.shared_by(request.mesh.devices_per_node)
        self.best_ns: float = BESIDE_KNOWN * likely_ns if plan is None else plan.predicted.step_time_ns
        self.known_ns = likely_ns if plan is None else plan.predicted.step_time_ns
        self.limit = request.memory_limit or self.shared.usable_bytes
        self.found: list[tuple[Template, str, ShortPlace, Plan]] = []
        self.rows: list[Tried] = []
        self._beyond = defaultdict[tuple[int, int], list[float]](list)  # of what was played, times the least it took
        self._peaks: dict[Template, int] = {}  # of what was played and did not fit
        self._steps: dict[Template, int] = {}  # of what was played whole and fits
        self._fitting: dict[Template, int] = {}  # of a family, what a step takes at least where it fits
        pinned = [rule.microbatches for rule in request.constraints if rule.microbatches is not None]
        self.pinned = pinned[:1]
        self.samples = min((graph.tensors[name].shape[0] for name in batch_inputs(graph)), default=_MANY)
        self.divides = cache(partial(divisible, self.folded.graph))

    def _counts_of(self, dp: int) -> list[int]:
        """Numbers of microbatches that are looked at, ascending: those in which each rank has equally many samples;
        where it cannot have that, those that divide the batch. The pinned number, if one is."""
        if self.pinned:
            return [count for count in self.pinned if self.samples >= dp * count]
        if self.samples < dp or self.samples == _MANY or self.request.mode != "train":
            return [1] if self.samples >= dp else []
        each = self.samples // (1 if self.samples % dp else dp)
        return [count for count in divisors(each) if self.samples >= dp * count and self.divides(count)]

    def look(self) -> None:
        """Raises nothing: a template that cannot be is told of in a row."""
        for tp in divisors(self.request.mesh.devices_per_node):
            if LESS_EACH * self.least_of_tp.get(tp, 0) > self.best_ns:
                break  # more ranks send more
            if is_interrupted() or not self._may_be_near(self.request.mesh.num_devices // tp, tp):
                break
        self._look_beside_fastest()

    def look_at_experts(self, experts: int) -> None:
        """At shapes whose ranks share so many experts, and send each token to those that it chose."""
        for tp in divisors(self.request.mesh.devices_per_node):
            dp = self.request.mesh.num_devices // tp
            counts = self._counts_of(dp)
            likely_ns = self._look_at_shared(dp, tp, experts, counts) if counts else 0.0
            if is_interrupted() or (tp > 1 and likely_ns > ALIKE * self.best_ns):
                break

    def _look_at_shared(self, dp: int, tp: int, experts: int, counts: Sequence[int]) -> float:
        """What a step likely takes where the ranks of a node share the experts, or those of more and more nodes, until
        that is far from the best plan."""
        near, found = self.request.mesh.devices_per_node // tp, list[float]()
        sizes = [size for size in divisors(dp) if 1 < size <= experts]
        for size in [*[size for size in sizes if size <= near][-1:], *(size for size in sizes if size > near)]:
            ways = EXCHANGES if size > near > 1 and size % near == 0 else EXCHANGES[:1]
            looks = [Template(dp, tp, 3 if dp > size else 0, ep=size, exchange=way) for way in ways]
            looks = [look for look in looks if len(self._axes(look)) <= MOST_AXES]
            found += [min(self._likely_of_fitting(look, counts) for look in looks)] if looks else []
            if is_interrupted() or (found and found[-1] > ALIKE * self.best_ns):
                break
        return min(found, default=math.inf)

    def _likely_of_fitting(self, family: Template, counts: Sequence[int]) -> float:
        """What a step likely takes in the best of a family that fits, once looked at; in its best, if none does."""
        least_ns = self._look_at(family, counts)
        return self._likely_ns(max(least_ns, self._fitting.get(family, 0) % _MANY), family.ep)

    def look_at_context(self, dp: int, tp: int, cp: int, contexts: Sequence[str]) -> tuple[float, float]:
        """At a shape that splits sequences in some ways, of a graph that says where they may be
        (`contexts.for_sequences`), until one is far from the best plan. What a step likely takes in the best of them,
        and in the best that fits.
        """
        counts = self._counts_of(dp) or [1]  # one sample is not cut, and needs no other number
        likely_ns = fitting_ns = math.inf
        for context in contexts:
            family = Template(dp, tp, 3, cp=cp, context=context)
            own_ns = self._likely_ns(self._look_at(family, counts))
            likely_ns = min(likely_ns, own_ns)
            fitting_ns = min(fitting_ns, self._likely_ns(self._fitting.get(family, 0)))
            if own_ns > ALIKE * self.best_ns:
                break
        return likely_ns, fitting_ns

    def _may_be_near(self, dp: int, tp: int) -> bool:
        """Looks at a shape. False where it is so much slower than the best, whatever its memory, that no larger `tp`,
        which sends more, is near it."""
        counts = self._counts_of(dp)
        one = Template(dp, tp, 3 if dp > 1 else 0, sequence_parallel=tp > 1)
        if not counts:
            return True
        before = len(self.found)
        least_ns = self._look_at(one, counts)
        is_near = self._likely_ns(least_ns) <= ALIKE * self.best_ns
        played = [plan.predicted.step_time_ns for *_, plan in self.found[before:]]
        if tp > 1 and is_near and min(played, default=_MANY) <= ALIKE * self.best_ns:
            self._look_at(replace(one, sequence_parallel=False), counts)  # which takes more memory, and starts less
        return tp == 1 or is_near

    def _look_at(self, family: Template, counts: Sequence[int]) -> int:
        """What a step takes at least in any number of microbatches.

        Looks at a template with nothing computed again, in these numbers until it fits; then with attention or all
        computed again of as many blocks as it takes, in the number of microbatches that is estimated to be fastest: of
        all, where none fits; of fewer, where that which fits takes much longer than it must, and they much less.
        """
        first = self._in(family, _first_of(counts) if self.is_tight else counts[0])
        try:
            known = KnownTemplate(self.place(first))
        except AutoparError as error:
            self._refuse(first, str(error))
            return 0
        if self._likely_ns(known.least_ns, family.ep) >= self.best_ns and first.microbatches > counts[0]:
            known = KnownTemplate(self.place(self._in(family, counts[0])))  # fewer may take less
        least_ns = self._fitting[family] = known.least_ns
        if self._is_slower(family, least_ns):
            return least_ns
        fitting = next((n for n in counts if self._with_less_sharded(self._in(family, n), known)), None)
        exposed = EXPOSED
        if fitting is not None:
            beyond_ns = self._steps.get(self._in(family, fitting), 0) - least_ns
            if beyond_ns <= (INSTEAD_AGAIN - 1) * least_ns:
                return least_ns
            counts = [count for count in counts if count < fitting]
            exposed = max(EXPOSED, beyond_ns / max(1, known.sent_ns(fitting)))
        recomputations = self._recomputations(family, counts, known, exposed) if self.request.mode == "train" else []
        if fitting is None:
            self._fitting[family] = min((one.bound_ns for one in recomputations), default=_MANY)
        elif not (recomputations and BESIDE_KNOWN * recomputations[0].least_ns < self.known_ns):
            return least_ns
        for one in recomputations:
            if not self._is_slower(one.template, one.bound_ns) and self._recomputed(one):
                break
        return least_ns

    def _in(self, family: Template, count: int, recompute: str = "none") -> Template:
        """A template of a family in so many microbatches, whose tokens travel in as many chunks as cost least then."""
        one = replace(family, microbatches=count)
        chunks = self._chunks(one) if one.ep > 1 else 1
        return replace(one, recompute=recompute, exchange_chunks=chunks)

    def _likely_ns(self, least_ns: int, ep: int = 1, count: int | None = None) -> float:
        """What a step takes if it is half as much beyond the least as those that were played with as many ranks that
        share experts, if any do in so many microbatches: less is gathered by more ranks, and in fewer."""
        kinds = (found for (of_ep, n), found in self._beyond.items() if of_ep == ep and (ep == 1 or count in (None, n)))
        return least_ns * (1 + min((times for found in kinds for times in found), default=1.0)) / 2

    def _is_slower(self, template: Template, least_ns: int) -> bool:
        """Whether it is likely to take longer than the best."""
        if self._likely_ns(least_ns, template.ep, template.microbatches) < self.best_ns:
            return False
        self._refuse(template, f"takes {least_ns:,} ns at least, the best {self.best_ns:,}")
        return True

    def _with_less_sharded(self, one: Template, known: KnownTemplate) -> bool:
        """Whether a template fits. Where it does and is near the best, so do others of its family, perhaps."""
        if known.needs(one.microbatches) > self.limit:
            self._refuse(one, f"needs {known.needs(one.microbatches):,} bytes a device at least")
            return False
        if self._is_slower(one, known.sending_ns(one.microbatches)):
            return False
        sharded = self._look(one)
        if sharded is None:
            return False
        self._look_less_sharded(one, sharded, known.usage(one.microbatches))
        return True

    def _look_less_sharded(self, one: Template, sharded: Plan, usage: int) -> None:
        """usage: estimate of the plan with ZeRO-3. What does not fit may, where what is cheap is computed again.

        What is stored whole may hide all that is waited for with ZeRO-3; it is not looked at where even that is slower.
        """
        told = sharded.predicted
        if told.step_time_ns - told.breakdown.exposed_communication_ns > NEAR_SHARDED * self.best_ns or one.zero < 3:
            return
        beyond = sharded.predicted.peak_bytes - usage
        less_sharded = (1, 0) if one.microbatches == 1 else (2, 1)
        for place, zero in enumerate(less_sharded):
            if self._look(replace(one, zero=zero), beyond if zero else None) is None:
                if self.request.mode == "train" and one.recompute == "none":
                    self._look_again_less_sharded(one, less_sharded[place:])
                break

    def _look_again_less_sharded(self, one: Template, less_sharded: Sequence[int]) -> None:
        """With what is cheap computed again, as far as it fits."""
        for zero in less_sharded:
            if self._look(replace(one, zero=zero, recompute="selective")) is None:
                break

    def _look_beside_fastest(self) -> None:
        """From the fastest template on, at those that differ from it in one thing, as long as one is faster: what fits
        is looked at in the fewest microbatches that fit, and with as little sharded as fits there; with more of them
        less may be computed again, and with shards inside of nodes alone less may be sent between them."""
        best = min(self._steps, key=lambda one: self._steps[one], default=None)
        if best is None or self.request.mode != "train" or self._steps[best] > ALIKE * self.best_ns:
            return
        looked = {best}
        while True:
            for one in (other for other in self._beside(best) if other not in looked and other not in self._peaks):
                looked.add(one)
                if one not in self._steps:
                    self._look(one)
            faster = min((one for one in looked if one in self._steps), key=lambda one: self._steps[one])
            if self._steps[faster] >= self._steps[best]:
                return
            best = faster

    def _beside(self, one: Template) -> Iterator[Template]:
        """Templates that differ in how much is sharded, among how many, or in how many microbatches."""
        per_node = max(1, self.request.mesh.devices_per_node // one.tp // one.cp)
        if one.zero and one.hsdp == 1 and one.ep == 1 and 1 < per_node < one.dp and one.dp % per_node == 0:
            yield replace(one, hsdp=per_node)
        counts = self._counts_of(one.dp)
        for more in [count for count in counts if count > one.microbatches][:1]:
            for zero in dict.fromkeys((1, 2, one.zero) if one.dp > 1 else (0,)):
                yield replace(one, microbatches=more, recompute="none", zero=zero)
        for fewer in [count for count in counts if count < one.microbatches][-1:]:
            zero = 1 if fewer == 1 and one.zero == 2 else one.zero  # gradients of one microbatch are summed at once
            yield replace(one, microbatches=fewer, recompute="selective", zero=zero)

    def _recomputations(
        self, family: Template, counts: Sequence[int], known: KnownTemplate, exposed: float
    ) -> list[_BlockRecomputation]:
        """To make a template fit by computing blocks again, the fastest first. known: of it without; exposed: the part
        of what it sends that is waited for."""
        options, found = recomputable(self.graph, self.paths), list[_BlockRecomputation]()
        for kind, groups in (("block", options.attention), ("full", options.full)):
            inside = known.inside(joined(groups))
            fitting = [c for c in counts if self._peak(family, known, c, inside // c) <= self.limit]
            if not groups or not fitting:
                continue
            try:
                again = KnownTemplate(self.place(self._in(family, fitting[-1], kind)))
            except AutoparError as error:
                self._refuse(replace(family, recompute=kind), str(error))
                continue
            for count in fitting:
                saved, every = known.usage(count) - again.usage(count), len(groups)
                if self._peak(family, known, count, saved) <= self.limit:
                    above = self._peak(family, known, count, 0) - self.limit
                    first = min(every, max(1, _blocks_for(above, saved, every)))
                    own_ns = (again.least_ns - known.least_ns) // every
                    sent_ns = known.sent_ns(count) + (again.sent_ns(count) - known.sent_ns(count)) * first // every
                    least_ns = known.least_ns + first * own_ns + round(sent_ns * exposed)
                    template = self._in(family, count, kind)
                    found.append(
                        _BlockRecomputation(
                            least_ns, template, groups, first, saved, own_ns, known.least_ns, known.sending_ns(count)
                        )
                    )
        return sorted(found, key=lambda recomputation: recomputation.least_ns)

    def _peak(self, family: Template, known: KnownTemplate, count: int, saved: int) -> int:
        """What is held at most, by estimate, in so many microbatches, where so much is not kept: what is, and a part of
        it on top."""
        played = self._peaks.get(self._in(family, count))
        return round((known.usage(count) - saved) / USAGE_BELOW) if played is None else played - saved

    def _recomputed(self, recomputation: _BlockRecomputation) -> bool:
        """Whether a template fits so."""
        try:
            return self._fewest(recomputation)
        except AutoparError as error:
            self._refuse(recomputation.template, str(error))
            return False

    def _fewest(self, recomputation: _BlockRecomputation) -> bool:
        """Computes again as few blocks as it takes to fit, if all do: each saves as much as the others."""
        place, every = self.place(recomputation.template), len(recomputation.groups)
        plan, count, tried, best = place.placements.plan(_ANY, *QUICK_SOLVE), recomputation.first, set[int](), None
        while count not in tried and len(tried) < TEMPLATE_TRIES:
            tried.add(count)
            plan = place.scored(replace(plan, recompute=joined(recomputation.groups[:count])))
            above = plan.predicted.peak_bytes - self.limit
            best = plan if above <= 0 else best
            more = _blocks_for(above, recomputation.saved, every)
            gained = -more * recomputation.own_ns
            if above <= 0 and (
                gained < LEAST_GAIN * min(self.best_ns, plan.predicted.step_time_ns)
                or plan.predicted.step_time_ns - gained >= self.best_ns
            ):
                break
            count = min(every, max(1, count + more))
        if best is not None:
            number = sum(group[0] in best.recompute for group in recomputation.groups)
            least_ns = recomputation.without_ns + number * recomputation.own_ns
            self._note(
                recomputation.template, best, f"{recomputation.template} of {number} of {every} blocks", least_ns
            )
        return best is not None

    def _look(self, template: Template, beyond: int | None = None) -> Plan | None:
        """One microbatch's plan; None where it does not fit, or is not possible.

        beyond: by how much the peak of such a template was above what its placements use by estimate.
        """
        if is_interrupted():
            return None
        try:
            plan = fitted(self.place(template), self.limit, beyond)
        except AutoparError as error:
            if isinstance(error, InfeasibleError) and error.smallest_bytes:
                self._peaks[template] = error.smallest_bytes
            self._refuse(template, str(error))
            return None
        self._note(template, plan, str(template), self.place(template).placements.least_step_ns(*QUICK_SOLVE))
        self._steps[template] = plan.predicted.step_time_ns
        return plan

    def _refuse(self, template: Template, why: str) -> None:
        self.rows.append(replace(_row(template, str(template)), infeasible=why))

    def _note(self, template: Template, plan: Plan, name: str, least_ns: int) -> None:
        told = plan.predicted
        self._beyond[template.ep, template.microbatches].append(max(1.0, told.step_time_ns / least_ns))
        self.found.append((template, name, self.place(template), plan))
        self.best_ns = min(self.best_ns, told.step_time_ns)
        self.known_ns = min(self.known_ns, told.step_time_ns)
        row = replace(_row(template, name), step_time_ns=told.step_time_ns, peak_bytes=told.peak_bytes)
        self.rows.append(row)

    # Places ----------------------------------------

    @cached_method
    def parts(self, count: int, chunks: int = 1) -> tuple[DividedGraph, DividedGraph, Incremental]:
        """Of the whole graph, of the short one, and what plays plans of one microbatch; in so many chunks."""
        graphs = (self.graph, self.folded.graph)
        given, folded = graphs if chunks == 1 else (in_chunks(graph, routed(graph), chunks) for graph in graphs)
        whole = divided(given, self.blocks, count)
        short = replace(divided(folded, self.blocks, count), copies=self.folded.copies)
        return whole, short, Incremental(whole.graph, self.shared)

    @cached_method
    def _chunks(self, one: Template) -> int:
        """In how many chunks the tokens of a template, in so many microbatches, cost least."""
        sharing, part = self._sharing(one), self.parts(one.microbatches)[1].graph
        trains = self.request.mode == "train"
        split = {name for name in DATA if name not in sharing}
        per_node = self.request.mesh.devices_per_node
        return chunks_where_shared(part, self._axes(one), sharing, split, per_node, self.shared, trains)

    def _sharing(self, one: Template) -> tuple[str, ...]:
        return expert_axes(self.request.mesh, one.dp, one.tp, one.cp, one.ep, one.exchange).sharing

    @cached_method
    def batch(self, count: int) -> dict[str, Type]:
        """How what is made of the batch is cut, in the first of equal blocks."""
        made = batch_types(self.parts(count)[1].graph)
        return {name: type_ for name, type_ in made.items() if self.blocks.representative_tensor(name) == name}

    def _axes(self, one: Template) -> LogicalMesh:
        return template_axes(
            self.request.mesh, one.dp, one.tp, 1, one.hsdp, cp=one.cp, ep=one.ep, exchange=one.exchange
        )  # fmt: skip

    @cached_method
    def place(self, template: Template) -> ShortPlace:
        one, axes = template, self._axes(template)
        whole, short, simulator = self.parts(template.microbatches, template.exchange_chunks)
        rules = template_constraints(
            short.graph, axes, template.zero, template.sequence_parallel, self.paths, self.batch(template.microbatches),
            positions(short.graph, self.blocks, template.cp), template.context, self._sharing(one),
            self.blocks,
        )  # fmt: skip
        again = template_recompute(self.graph, self.paths, template.recompute)
        request = replace(self.request, constraints=(*rules, *self.request.constraints), recompute=again)
        strictly = len(axes) > MOST_EXPLAINED
        return ShortPlace(whole, axes, request, self.profile, strictly=strictly, short=short, simulator=simulator)


class FoundTemplate(NamedTuple):
    """One that fits, with its outline and plan, which is of the graph in its `exchange_chunks`; what names the plan,
    and what counts the bytes that it sends."""

    template: Template
    outline: Outline
    plan: Plan
    made: Callable[[], Plan]
    told: Callable[[Plan], Plan]


def faster_templates(
    graph: Graph, plan: Plan | None, request: Request, experts: int = 0,
    likely_ns: float = math.inf, least_of_tp: Mapping[int, int] | None = None,
) -> tuple[list[Tried], Iterator[FoundTemplate]]:  # fmt: skip
    """Templates of a graph that may be faster than a plan, if there is one: a row of the report for each that is looked
    at, and those that fit. experts: those whose ranks share as many at most, and no others. likely_ns, least_of_tp: see
    `Family`."""
    family = Family(graph, plan, request, likely_ns, least_of_tp)
    if experts:
        family.look_at_experts(experts)
    else:
        family.look()
    found = (
        FoundTemplate(template, place.outline, plan, partial(named, name, plan), place.part.with_traffic)
        for template, name, place, plan in family.found
    )
    return family.rows, found


def named(name: str, plan: Plan) -> Plan:
    """A template as a plan for the step, which says what it is."""
    return replace(plan, search=replace(plan.search, method=f"template {name}: {plan.search.method}"))


def _first_of(counts: Sequence[int]) -> int:
    """The number of microbatches in which a template is known, where many are needed."""
    return max((count for count in counts if count <= FIRST_COUNT), default=counts[0])


def _blocks_for(size: int, saved: int, every: int) -> int:
    """How many of all blocks, which save so much together, save at least a size; of what may be kept, at most."""
    return -(-size * every // max(1, saved))


def _row(template: Template, name: str) -> Tried:
    """What the report says of a template."""
    sizes = (size for size in (template.dp, template.cp, template.tp) if size > 1)
    return Tried(mesh="x".join(map(str, sizes)), template=name, microbatches=template.microbatches)
