"""What a job takes: its plan by `template_plan`, the simulated step, memory, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopar.auditing.decoder import constraints
from autopar.auditing.job import TrainingJob
from autopar.auditing.written import written
from autopar.by_hand import template_of_graph
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.odds import with_odds
from autopar.profiler import load_profile
from autopar.rewrites import graph_of
from autopar.simulate import Overlap, Sums, predict, simulate

if TYPE_CHECKING:
    from torch import nn

ANY_MEMORY = 1 << 50  # whether it fits is what the verdict says, so the plan may take what it takes
EVEN = 0.5


class TracedModels:
    """A job's model as a graph, for each global batch once: written down for the file's sizes, traced where it is the
    user's own module."""

    def __init__(self, model: nn.Module | None = None, inputs: Any = None) -> None:
        self._model, self._inputs = model, inputs
        self._graphs: dict[tuple[Any, ...], Graph] = {}

    @property
    def is_given(self) -> bool:
        """Whether the model is a module of the user's."""
        return self._model is not None

    def graph(self, job: TrainingJob) -> Graph:
        """The graph of a whole batch."""
        key = job.model, job.global_batch, job.seq, job.precision
        if key not in self._graphs:
            self._graphs[key] = self._written(job) if self._model is None else self._traced(job, self._model)
        return self._graphs[key]

    def _written(self, job: TrainingJob) -> Graph:
        assert job.model is not None and job.global_batch is not None and job.seq is not None
        return written(job.model, job.global_batch, job.seq, job.precision, job.compiles)

    def _traced(self, job: TrainingJob, model: nn.Module) -> Graph:
        import torch

        from autopar.trace import trace  # and torch.export with it, which a written graph does without

        dtype = torch.bfloat16 if job.precision == "bf16" else None
        return trace(model, self._inputs, mode="train", compute_dtype=dtype)


@dataclass(frozen=True)
class JobPrediction:
    """A job's plan, and what the cost model says of it."""

    job: TrainingJob
    plan: Plan

    @property
    def step_ns(self) -> int:
        return self.plan.predicted.step_time_ns

    @property
    def fits(self) -> bool:
        """Whether memory is more likely enough than not."""
        return self.odds > EVEN

    @property
    def odds(self) -> float:
        """How likely memory is enough; where the profile does not say, whether the peak is below its limit."""
        told = self.plan.predicted
        if told.fits_probability is not None:
            return told.fits_probability
        facts = load_profile(self.plan.mesh.profile).facts
        return float(told.peak_bytes <= facts.capacity_bytes - facts.reserve_bytes)

    @cached_property
    def flops(self) -> float:
        """Of the model for one step on one device; 0 where its sizes are not known."""
        job = self.job
        if job.model is None or job.global_batch is None or job.seq is None:
            return 0.0
        return job.model.step_flops(job.global_batch, job.seq) / self.plan.mesh.num_devices

    @property
    def flops_a_second(self) -> float:
        """Of one device."""
        return self.flops * 1e9 / max(1, self.step_ns)

    @property
    def utilisation(self) -> float:
        """Share of the device's peak for dense products (MFU)."""
        dtype = "float32" if self.job.precision == "fp32" else "bfloat16"
        return self.flops_a_second / load_profile(self.plan.mesh.profile).facts.peak_flops[dtype]

    @property
    def parts(self) -> dict[str, int]:
        """Where the step goes, in ns, the longest first."""
        spent = self.plan.predicted.breakdown
        found = {
            "compute": spent.compute_ns, "recomputation": spent.recompute_ns,
            "exposed communication": spent.exposed_communication_ns, "pipeline bubble": spent.bubble_ns,
            "optimizer": spent.optimizer_ns,
        }  # fmt: skip
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def bound(self) -> str:
        """What the step is bound by: the largest part, and of communication which kind moves most bytes."""
        part = next(iter(self.parts))
        sent = self.plan.predicted.comm_bytes
        if part == "exposed communication" and sent:
            return f"{part} ({max(sent, key=lambda kind: sent[kind])})"
        return part


def predicted(job: TrainingJob, models: TracedModels) -> JobPrediction:
    """The job's plan, simulated. Raises AutoparError where `template_plan` cannot express it."""
    graph = models.graph(job)
    plan = template_of_graph(
        graph, job.mesh, dp=job.ranks_of_data, tp=job.tp, pp=job.pp, microbatches=job.microbatches,
        schedule=job.schedule, chunks=max(2, job.chunks), layers=job.layers_of_stages,
        sequence_parallel=job.sequence_parallel,
        zero=job.zero if job.ranks_of_data * job.cp > 1 else 0, hsdp=_inner(job), cp=job.cp, context=job.context,
        ep=job.ep, recompute=job.recompute, optimizer=job.optimizer,
        precision="bf16" if job.precision == "bf16" else None, memory_limit=ANY_MEMORY,
        constraints=() if models.is_given else constraints(job), overlap=overlap_of(job),
    )  # fmt: skip
    return JobPrediction(job, _as_job(plan, graph, job))


def overlap_of(job: TrainingJob) -> Overlap:
    """What the job's software sends beside computation."""
    return Overlap(Sums.EARLY if job.overlaps_sums else Sums.LATE)


def _inner(job: TrainingJob) -> int:
    """Among how many neighbours shards are, 1 for all."""
    is_part = job.zero > 0 and 1 < job.sharding_ranks < job.ranks_of_data
    return job.sharding_ranks if is_part and job.ep == 1 else 1


def _as_job(plan: Plan, graph: Graph, job: TrainingJob) -> Plan:
    """The plan with what templates do not say: which layers are computed again."""
    whole = graph_of(plan, graph)
    part = divided_graph(whole, plan.microbatches)
    again = _layers_again(plan, part, job)
    if again is None:
        return plan
    plan = replace(plan, recompute=again)
    timeline = simulate(part, plan, load_profile(plan.mesh.profile), overlap_of(job))
    return with_odds(replace(plan, predicted=predict(timeline)), whole)


def _layers_again(plan: Plan, part: Graph, job: TrainingJob) -> tuple[str, ...] | None:
    """The paths of the layers that are computed again; None where all are, or none."""
    if job.recompute != "full" or (job.recompute_layers is None and job.recompute_every == 1):
        return None
    found = list[str]()
    number = 0
    for stage in plan.stages:
        modules = (".".join(part.node_by_name[name].scope.module.split(".")[:2]) for name in stage.nodes)
        own = [path for path in dict.fromkeys(modules) if path.startswith("layers.")]
        for place, path in enumerate(own):
            number += 1
            if job.recompute_layers is None:
                found += [path] if number % job.recompute_every == 0 else []
            elif place < job.recompute_layers:
                found.append(path)
    return tuple(found)
