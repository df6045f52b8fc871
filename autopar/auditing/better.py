"""The best job that a framework's own configuration can say, on the same devices, for the same model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.auditing.frameworks import Framework
from autopar.auditing.job import PLANS, JobFile, ModelSizes, TrainingJob, divisors
from autopar.auditing.legality import faults
from autopar.auditing.prediction import JobPrediction, TracedModels, predicted
from autopar.cost import Profile
from autopar.errors import AutoparError
from autopar.profiler import load_profile

MICRO_BATCHES = (1, 2, 4, 8)
_REACHED = 0.55  # share of a device's peak that products reach, in the order of jobs alone


def best_job(
    file: JobFile,
    job: TrainingJob,
    framework: Framework,
    models: TracedModels,
    search: str,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[JobPrediction | None, int]:
    """The fastest that fits of the jobs that were simulated, and how many were; None where none fits or is legal."""
    best: JobPrediction | None = None
    tried = 0
    for candidate in ranked(file, job, framework)[: PLANS[search]]:
        try:
            found = predicted(candidate, models)
        except AutoparError:
            continue  # what templates cannot express is not proposed
        tried += 1
        tell(f"{tried} configurations")
        if found.fits and (best is None or found.step_ns < best.step_ns):
            best = found
    return best, tried


def ranked(file: JobFile, job: TrainingJob, framework: Framework) -> list[TrainingJob]:
    """Legal jobs, by what a sum of simple terms says of their time, those that surely do not fit left out."""
    assert job.model is not None
    model, profile, framework = job.model, load_profile(job.mesh.profile), _narrowed(framework, file)
    legal = [one for one in _space(job, framework) if not faults(file, one)]
    likely = [one for one in legal if _bytes(one, model) < 1.1 * profile.facts.capacity_bytes]
    return sorted(likely or legal, key=lambda one: (_seconds(one, model, profile), _bytes(one, model)))


# The space ----------------------------------------


def _narrowed(framework: Framework, file: JobFile) -> Framework:
    """What this file of Accelerate's can say: it names one of several ways to run."""
    if file.job.framework != "accelerate":
        return framework
    kind = str(file.where["kind"].value) if "kind" in file.where else "NO"
    has_degrees = "replicate" in file.where
    if kind == "FSDP":
        return framework._replace(has_tensor=has_degrees, has_contexts=has_degrees)
    still = framework._replace(recomputations=(), has_tensor=False, has_contexts=False, zeros=(file.job.zero,))
    if kind == "MEGATRON_LM":
        return still._replace(has_tensor=True, has_stages=True)
    return still._replace(zeros=(3, 2, 1, 0)) if kind == "DEEPSPEED" else still


def _space(job: TrainingJob, framework: Framework) -> Iterator[TrainingJob]:
    assert job.devices is not None and job.per_node is not None and job.global_batch is not None
    zeros = framework.zeros if job.zero in framework.zeros else (job.zero,)
    tensor = divisors(job.per_node) if framework.has_tensor else [job.tp]
    stages = [n for n in divisors(job.devices) if n <= 16] if framework.has_stages else [job.pp]
    contexts = sorted({1, job.cp}) if framework.has_contexts else [job.cp]
    for tp in tensor:
        for pp in stages:
            for cp in contexts:
                if job.devices % (tp * pp * cp) or job.global_batch % (job.devices // (tp * pp * cp)):
                    continue
                yield from _batches(job, framework, zeros, (job.devices // (tp * pp * cp), tp, pp, cp))


def _batches(
    job: TrainingJob, framework: Framework, zeros: tuple[int, ...], degrees: tuple[int, int, int, int]
) -> Iterator[TrainingJob]:
    data, tp, pp, cp = degrees
    local = (job.global_batch or 1) // data
    sizes = [size for size in MICRO_BATCHES if local % size == 0]
    for micro in sizes if "micro_batch" in _written(job) else [job.micro_batch or 1]:
        for zero in zeros if data * cp > 1 else (job.zero,):
            for again in dict.fromkeys((*framework.recomputations, job.recompute)):
                one = replace(
                    job, data=data, replicate=1, shard=data, tp=tp, pp=pp, cp=cp, sequence_parallel=_beside(job, tp),
                    zero=zero, recompute=again, recompute_layers=None, recompute_every=1,
                    stage_layers=None, micro_batch=micro, accumulation=local // micro,
                    schedule="1f1b" if pp == 1 else job.schedule,
                )  # fmt: skip
                yield from _scheduled(one, job, local, micro)


def _written(job: TrainingJob) -> tuple[str, ...]:
    """What the framework's file says of a batch: Accelerate's leave it to the script."""
    return () if job.framework == "accelerate" else ("micro_batch",)


def _beside(job: TrainingJob, tp: int) -> bool:
    return tp > 1 and (job.framework != "accelerate" or job.sequence_parallel)


def _scheduled(one: TrainingJob, job: TrainingJob, local: int, micro: int) -> Iterator[TrainingJob]:
    if job.framework == "torchtitan":
        whole = replace(one, micro_batch=local, accumulation=1, pipeline_micro_batch=micro)
        one = whole if one.pp > 1 else replace(one, pipeline_micro_batch=None)
    if job.framework == "torchtitan" and one.pp > 1 and one.zero == 3:
        return  # gathered anew for each microbatch: FSDP keeps them there
    yield replace(one, chunks=1, schedule="1f1b")
    for chunks in (2, 4):
        fits = job.framework == "megatron" or (job.framework == "torchtitan" and chunks == 2)
        if one.pp > 1 and fits:
            yield replace(one, chunks=chunks, schedule="interleaved")


# An order ----------------------------------------


def _seconds(job: TrainingJob, model: ModelSizes, profile: Profile) -> float:
    """Compute, what parallelism sends, and the bubble, as if nothing overlapped but gathers of parameters."""
    assert job.global_batch and job.seq and job.devices
    links = list(profile.links.values())
    inner, outer = links[0].bandwidth, links[-1].bandwidth
    extra = {"full": 4 / 3, "selective": 1.05, "block": 1.1}.get(job.recompute, 1.0)
    small = 1 + 0.25 / (job.pipeline_micro_batch or job.micro_batch or 1)
    compute = extra * small * model.step_flops(job.global_batch, job.seq) / job.devices
    compute /= _REACHED * profile.facts.peak_flops["bfloat16"]
    tokens = job.global_batch * job.seq / job.ranks_of_data / job.cp
    tensor = (job.tp > 1) * 8 * tokens * model.hidden * 2 * model.layers / job.pp / inner * (job.tp - 1) / job.tp
    weights = 2 * model.parameters / job.tp / job.pp
    slow = outer if job.ranks_of_data * job.tp > (job.per_node or 1) else inner
    gathers = (3 * (job.microbatches if job.zero == 3 else 1) if job.zero else 2) * weights / slow
    bubble = (job.pp - 1) / max(1, job.microbatches * job.chunks)
    return (
        (compute + tensor * extra) * (1 + bubble) + max(0.0, gathers - 0.5 * compute)
        if job.ranks_of_data > 1
        else ((compute + tensor) * (1 + bubble))
    )


def _bytes(job: TrainingJob, model: ModelSizes) -> float:
    """Of one device, roughly: parameters, gradients, optimizer, activations in flight, logits."""
    assert job.seq is not None
    own = model.parameters / job.tp / job.pp
    shards = job.sharding_ranks * job.cp
    state = own * {0: 18, 1: 6 + 12 / shards, 2: 2 + 16 / shards, 3: 18 / shards}.get(job.zero, 18)
    state *= 8 / 18 if job.precision == "bf16 alone" else 1
    micro = job.pipeline_micro_batch or job.micro_batch or 1
    tokens = micro * job.seq / job.cp / job.tp
    layer = {"full": 2, "selective": 20, "block": 30}.get(job.recompute, 34) * model.hidden * tokens
    in_flight = min(job.pp, job.microbatches) / job.pp
    logits = micro * job.seq * model.vocab * 6 / job.tp / job.cp
    return state + layer * model.layers * in_flight + logits


def gain(old: JobPrediction, new: JobPrediction) -> float:
    """How much faster the new one is, 0 for equally fast."""
    return old.step_ns / max(1, new.step_ns) - 1 if math.isfinite(old.step_ns) else 0.0
