"""Whether a job can run at all: what has to divide what, in each framework's own terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.auditing.job import JobFile, LegalityFault, ModelSizes, TrainingJob, divisors

_OF_EVEN_STAGES = ("megatron",)
_PADS_VOCABULARY = ("megatron", "nanotron")


def faults(file: JobFile, job: TrainingJob) -> list[LegalityFault]:
    """All that stands against a job whose devices are known."""
    found = [*_devices(file, job), *_batch(file, job), *_stages(file, job), *_sequence(file, job), *_zero(file, job)]
    if job.model is not None:
        found += [*_tensor(file, job, job.model), *_layers(file, job, job.model), *_experts(file, job, job.model)]
    return found


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[-6:]))


def _devices(file: JobFile, job: TrainingJob) -> Iterator[LegalityFault]:
    degrees = {"dp": job.ranks_of_data, "tp": job.tp, "pp": job.pp, "cp": job.cp}
    product = job.ranks_of_data * job.tp * job.pp * job.cp
    where = file.place("data", "replicate", "shard", "tp", "pp", "cp")
    if job.devices is not None and product != job.devices:
        text = " × ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "dp 1"
        yield LegalityFault(
            "devices", f"a product of degrees of {job.devices} devices", f"{text} = {product}", where,
            f"choose degrees whose product is {job.devices}, or run on {product} devices",
        )  # fmt: skip
    if job.data is not None and job.data % job.sharding_ranks:
        yield LegalityFault(
            "shards", f"a number that divides the {job.data} data-parallel ranks", str(job.shard), where,
            f"one of {_some(divisors(job.data))}",
        )  # fmt: skip


def _batch(file: JobFile, job: TrainingJob) -> Iterator[LegalityFault]:
    whole, micro, ranks = job.global_batch, job.micro_batch, job.ranks_of_data
    where = file.place("global_batch", "micro_batch", "accumulation")
    if whole is None or micro is None:
        return
    once = micro * ranks
    if whole % once or (job.accumulation and job.accumulation * once != whole):
        exact = f" × {job.accumulation} times" if job.accumulation and job.accumulation > 1 else ""
        near = max(once, round(whole / once) * once)
        yield LegalityFault(
            "global batch", f"a multiple of micro batch {micro} × {ranks} data-parallel ranks{exact}", f"{whole}",
            where,
            f"use {near}, or a micro batch among {_some([n for n in divisors(max(1, whole // ranks)) if n <= micro])}",
        )  # fmt: skip
    if job.pipeline_micro_batch and micro % job.pipeline_micro_batch:
        yield LegalityFault(
            "microbatches of the pipeline", f"a size that divides the local batch of {micro}",
            str(job.pipeline_micro_batch), file.place("pipeline_micro_batch"), f"one of {_some(divisors(micro))}",
        )  # fmt: skip


def _stages(file: JobFile, job: TrainingJob) -> Iterator[LegalityFault]:
    if job.pp == 1:
        return
    where = file.place("pp", "schedule", "chunks", "global_batch", "micro_batch", "accumulation")
    if job.framework == "torchtitan":
        yield from _stages_of_torch(job, where)
    elif job.chunks > 1 and job.microbatches % job.pp:
        yield LegalityFault(
            "interleaved schedule", f"a multiple of {job.pp} microbatches", str(job.microbatches), where,
            f"a global batch of a multiple of {(job.micro_batch or 1) * job.ranks_of_data * job.pp}, or no chunks",
        )  # fmt: skip


_IN_ROUNDS = ("interleaved", "interleaved_zero_bubble")


def _stages_of_torch(job: TrainingJob, where: str) -> Iterator[LegalityFault]:
    """What torch.distributed.pipelining's schedules ask of the number of microbatches."""
    stages, parts = job.pp * job.chunks, job.microbatches
    rounds = max(1, parts // job.pp)
    if job.schedule in _IN_ROUNDS and parts % rounds:
        near = rounds * (parts // rounds)
        yield LegalityFault(
            "interleaved schedule", f"a multiple of the {rounds} rounds of microbatches", str(parts), where,
            f"a local batch of {near * (job.pipeline_micro_batch or 1)}",
        )  # fmt: skip
    if job.schedule not in (*_IN_ROUNDS, "zero_bubble_v") and parts < stages:
        yield LegalityFault(
            "pipeline", f"at least as many microbatches as there are stages, {stages}", str(parts), where,
            f"a local batch of {stages * (job.pipeline_micro_batch or 1)}, or fewer stages",
        )  # fmt: skip


def _sequence(file: JobFile, job: TrainingJob) -> Iterator[LegalityFault]:
    if job.seq is None:
        return
    where = file.place("seq", "cp", "tp")
    parts = job.cp * (1 if job.context == "heads" else 2) if job.cp > 1 else 1
    if job.cp > 1 and job.seq % parts:
        yield LegalityFault(
            "context parallelism", f"a sequence that {parts} parts divide (two a rank, so that a causal mask balances)",
            str(job.seq), where, f"a length of {-(-job.seq // parts) * parts}, or cp among "
            f"{_some([n for n in divisors(job.seq) if job.seq % (2 * n) == 0])}",
        )  # fmt: skip
    parts *= job.tp if job.sequence_parallel else 1
    if job.sequence_parallel and job.seq % parts:
        yield LegalityFault("sequence parallelism", f"a sequence that {parts} parts divide", str(job.seq), where,
                            f"a length of {-(-job.seq // parts) * parts}, or no sequence parallelism")  # fmt: skip


def _zero(file: JobFile, job: TrainingJob) -> Iterator[LegalityFault]:
    if job.framework == "deepspeed" and job.zero > 1 and job.pp > 1:
        yield LegalityFault("ZeRO", "stage 0 or 1 beside pipeline stages", str(job.zero), file.place("zero"), "use 1")
    if job.zero > 3:
        yield LegalityFault("ZeRO", "a stage from 0 to 3", str(job.zero), file.place("zero"), "use 3")


def _tensor(file: JobFile, job: TrainingJob, model: ModelSizes) -> Iterator[LegalityFault]:
    if model.heads % model.kv_heads:
        yield LegalityFault("heads", f"a multiple of {model.kv_heads} key/value heads", f"{model.heads} heads",
                            file.place("model", "model.num_attention_heads", "model.num_key_value_heads"),
                            f"key/value heads among {_some(divisors(model.heads))}")  # fmt: skip
    sizes = {"heads": (model.heads, "model.num_attention_heads"), "key/value heads": (model.kv_heads,
        "model.num_key_value_heads"),
             "MLP's hidden size": (model.expert_ffn if model.experts else model.ffn, "model.intermediate_size"),
             "hidden size": (model.hidden, "model.hidden_size")}  # fmt: skip
    if job.framework not in _PADS_VOCABULARY:
        sizes["vocabulary"] = model.vocab, "model.vocab_size"
    for name, (size, field) in sizes.items():
        if size % job.tp and not (name == "hidden size" and not job.sequence_parallel):
            yield LegalityFault(
                "tensor parallelism", f"{name} that tp={job.tp} divides", str(size), file.place("tp", field),
                f"tp among {_some([n for n in divisors(size) if n <= job.tp])}",
            )  # fmt: skip
    both = job.tp * job.cp
    if job.cp > 1 and job.context == "heads" and (model.heads % both or model.kv_heads % both):
        yield LegalityFault("context parallelism over heads", f"key/value heads that {both} ranks divide",
                            str(model.kv_heads), file.place("cp", "tp"), "a ring, or fewer ranks")  # fmt: skip


def _layers(file: JobFile, job: TrainingJob, model: ModelSizes) -> Iterator[LegalityFault]:
    stages = job.pp * job.chunks
    where = file.place("pp", "chunks", "model")
    if job.pp == 1 or job.stage_layers is not None:
        return
    first, last = job.end_weights or (0, 0)
    layers = model.layers + first + last
    if layers // stages < max(1, first, last):
        most = layers // max(1, first, last)
        said = f" with {first} less in the first stage and {last} in the last" if first or last else ""
        yield LegalityFault("stages", f"at most {most} for {model.layers} layers{said}", str(stages), where,
                            "fewer stages")  # fmt: skip
    elif job.framework in _OF_EVEN_STAGES and layers % stages:
        chosen = [n for n in divisors(layers) if n <= stages]
        yield LegalityFault("stages", f"a number that divides {layers} layers", str(stages), where,
                            f"one of {_some(chosen)}")  # fmt: skip


def _experts(file: JobFile, job: TrainingJob, model: ModelSizes) -> Iterator[LegalityFault]:
    where = file.place("ep", "model.experts")
    if job.ep > 1 and not model.experts:
        yield LegalityFault("expert parallelism", "ep=1 for a model without experts", str(job.ep), where, "use 1")
        return
    if not model.experts:
        return
    if not 1 <= model.chosen_experts <= model.experts:
        yield LegalityFault("experts", f"from 1 to {model.experts} of them chosen by a token",
                            str(model.chosen_experts), where, "fewer, or more experts")  # fmt: skip
    ranks = (job.sharding_ranks if job.framework == "torchtitan" else job.ranks_of_data) * job.cp * job.tp
    if model.experts % job.ep:
        yield LegalityFault("expert parallelism", f"a number that divides {model.experts} experts", str(job.ep), where,
                            f"one of {_some([n for n in divisors(model.experts) if ranks % n == 0])}")  # fmt: skip
    if ranks % job.ep:
        yield LegalityFault("expert parallelism", f"a number that divides the {ranks} ranks that share experts",
                            str(job.ep), where,
                            f"one of {_some(divisors(math.gcd(ranks, model.experts)))}")  # fmt: skip
    if job.framework == "megatron" and job.tp > 1 and not job.sequence_parallel:
        yield LegalityFault("experts with tensor parallelism", "sequence parallelism beside", "none",
                            file.place("sequence_parallel", "tp"), "add --sequence-parallel")  # fmt: skip
