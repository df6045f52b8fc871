"""torchtitan's TOML: read, and the changes that say another job in it."""

from __future__ import annotations

from typing import Any

from autopar.auditing.flavors import FLAVORS, flavor
from autopar.auditing.job import JobFile, ModelSizes, TrainingJob
from autopar.auditing.taking import Taker, beside, missing
from autopar.auditing.values import toml_values

FORM = "toml"
SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "LoopedBFS": "interleaved",
             "InterleavedZeroBubble": "interleaved_zero_bubble", "ZBVZeroBubble": "zero_bubble_v",
             "DualPipeV": "dualpipev"}  # fmt: skip
_OTHER_SCHEDULES = ("LoopedBFS",)
_P = "parallelism."
_EACH = f"{_P}pipeline_parallel_layers_per_stage"

KNOWN = [
    *missing("half of the parameters' and gradients' state would live on the host", "training.enable_cpu_offload"),
    *missing("the optimizer's step inside the backward pass frees gradients early", "optimizer.early_step_in_backward"),
    *missing("replica groups that may leave and join", "fault_tolerance.enable"),
    *missing("compiled autograd", "parallelism.enable_compiled_autograd"),
    *missing("stages cut at named modules", "parallelism.pipeline_parallel_split_points",
             "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_module_fqns_per_model_part"),
    *missing("a schedule of the user's own", "parallelism.pipeline_parallel_schedule_csv"),
    *beside("parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_*_stage_less_layers",
            why="counts with stages alone"),
    *missing("the optimizer's state in another type: planned in float32", "optimizer.state_dtype",
             off=("float32", None)),
    *missing("tensor parallelism inside of experts", "parallelism.expert_tensor_parallel_degree", off=(1, None)),
    *beside("job.*", "profiling.*", "metrics.*", "checkpoint.*", "validation.*", "lr_scheduler.*", "comm.*",
            "fault_tolerance.*", "model.*path", "model.print_after_conversion", "debug.*", "memory_estimation.*"),
    *beside(*(f"optimizer.{name}" for name in ("lr", "eps", "beta1", "beta2", "weight_decay", "implementation",
        "fused")),
            why="a number of the optimizer, or how its kernels are called"),
    *beside("training.steps", "training.max_norm", "training.dataset*", "training.data.*", "training.seed",
            "training.gc_*", "training.deterministic", "training.data_parallel_*path", "training.warmup_steps"),
    *beside("float8.*", "mx.*", "quantize.*", why="counts with the converter of that name alone"),
    *beside("compile.components", "compile.backend", "compile.fullgraph", why="which parts are compiled"),
    *missing("a budget of memory that the compiler spends", "activation_checkpoint.memory_budget"),
    *beside(*(f"activation_checkpoint.{name}" for name in (
        "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "preserve_rng_state", "determinism_check",
        "debug",
        "visualize_memory_budget_pareto", "selective_ac_option")), why="fine print of what is computed again"),
    *beside("parallelism.disable_loss_parallel", why="the plan gathers logits where that is cheaper"),
]  # fmt: skip


def read(name: str, text: str) -> JobFile:
    """A TOML configuration as a job. Degrees that are left to the number of devices stay open."""
    taker = Taker(name, text, toml_values(text, name))
    cp = taker.whole("cp", f"{_P}context_parallel_degree", "experimental.context_parallel_degree", default=1)
    pp = taker.whole("pp", f"{_P}pipeline_parallel_degree", "experimental.pipeline_parallel_degree", default=1)
    tp = taker.whole("tp", f"{_P}tensor_parallel_degree", "training.tensor_parallel_degree", default=1)
    shard = taker.whole("shard", f"{_P}data_parallel_shard_degree", "training.data_parallel_shard_degree", absent=(-1,))
    replicate = taker.whole(
        "replicate", f"{_P}data_parallel_replicate_degree", "training.data_parallel_replicate_degree", default=1
    )
    schedule = _schedule(taker) if pp > 1 else "1f1b"
    if pp == 1:
        taker.given(f"{_P}pipeline_parallel_schedule")
    pieces = taker.whole("pipeline_micro_batch", f"{_P}pipeline_parallel_microbatch_size", default=1)
    recompute, every = _recompute(taker)
    model = _model(taker)
    chunks, weights = _stages(taker, pp, schedule, model)
    job = TrainingJob(
        "torchtitan", model, replicate=replicate, shard=shard, zero=_zero(taker, pp, shard), tp=tp, pp=pp,
        cp=cp,
        sequence_parallel=tp > 1, schedule=schedule, chunks=chunks, end_weights=weights,
        context="gather" if _rotates_gathered(taker, cp) else "ring",
        ep=taker.whole("ep", f"{_P}expert_parallel_degree", default=1),
        micro_batch=taker.whole("micro_batch", "training.local_batch_size", "training.batch_size", default=8),
        pipeline_micro_batch=pieces if pp > 1 else None,
        global_batch=taker.whole("global_batch", "training.global_batch_size", absent=(-1,)),
        seq=taker.whole("seq", "training.seq_len", default=2048), recompute=recompute, recompute_every=every,
        precision=_precision(taker), optimizer=_optimizer(taker),
        compiles=taker.true("compiles", "compile.enable", "training.compile"),
    )  # fmt: skip
    if (replicate or 1) > 1 and shard == 1 and max(tp, pp, cp) > 1:
        taker.fault("replicas", "fully sharded ranks beside tensor, pipeline or context parallelism (DDP is alone)",
                    f"data_parallel_replicate_degree {replicate}, data_parallel_shard_degree 1",
                    "shard among the replicas instead", f"{_P}data_parallel_replicate_degree",
                    f"{_P}data_parallel_shard_degree")  # fmt: skip
    if taker.true("async_tp", f"{_P}enable_async_tensor_parallel") and tp > 1:
        taker.note("approximated", "gathers and sums of tensor parallelism are taken to be in the open",
                   f"{_P}enable_async_tensor_parallel")  # fmt: skip
    return taker.file(job, KNOWN)


def _schedule(taker: Taker) -> str:
    found = taker.word("schedule", f"{_P}pipeline_parallel_schedule", choices=SCHEDULES, default="1f1b")
    item = taker.where.get("schedule")
    if item is not None and item.value in _OTHER_SCHEDULES:
        taker.note("approximated", f"simulated as {found}", item.key)
    return str(found)


_SINGLE, _OF_TWO = ("1f1b", "gpipe"), ("zero_bubble_v", "dualpipev")


def _stages(taker: Taker, pp: int, schedule: str, model: ModelSizes | None) -> tuple[int, tuple[int, int] | None]:
    """Chunks of a rank, and how many layers fewer the first and the last stage have (pipeline_llm)."""
    if pp == 1:
        return 1, None
    first, last = (
        taker.whole("ends", f"{_P}pipeline_parallel_{end}_stage_less_layers", least=0, default=1)
        for end in ("first", "last")
    )
    most = 1 if schedule in _SINGLE else 2
    each = taker.whole("chunks", _EACH)
    if each is None or model is None:
        return most, (first, last)
    stages = -(-(model.layers + first + last) // each)
    chunks = stages // pp
    is_right = chunks == most if schedule in (*_SINGLE, *_OF_TWO) else chunks >= most
    if stages % pp or not is_right:
        wanted = (
            f"{most * pp} stages" if schedule in (*_SINGLE, *_OF_TWO) else f"a multiple of {pp} stages, twice at least"
        )
        near = -(-(model.layers + first + last) // (most * pp))
        taker.fault("stages", wanted, f"{stages} of {each} layers", f"{near} layers a stage", _EACH)
    return max(1, chunks), (first, last)


def _zero(taker: Taker, pp: int, shard: int | None) -> int:
    """FSDP keeps gathered parameters until the backward pass, as ZeRO-2 does, where it is told so or there are
    stages."""
    policy = taker.word("zero", f"{_P}fsdp_reshard_after_forward", choices={"default": 3, "always": 3, "never": 2},
                        default=3)  # fmt: skip
    said = taker.values.get(f"{_P}fsdp_reshard_after_forward")
    if shard == 1:
        return 0
    return 2 if pp > 1 and (said is None or said.value == "default") else int(policy)


def _rotates_gathered(taker: Taker, cp: int) -> bool:
    return bool(taker.word("context", f"{_P}context_parallel_rotate_method",
                           choices={"allgather": True, "alltoall": False}, default=True)) or cp == 1  # fmt: skip


def _recompute(taker: Taker) -> tuple[str, int]:
    mode = taker.word("recompute", "activation_checkpoint.mode",
                      choices={"none": "none", "selective": "selective", "full": "full"},
                      default="selective")  # fmt: skip
    option = taker.given("activation_checkpoint.selective_ac_option")
    if mode != "selective":
        return str(mode), 1
    text = str(option.value if option else "2")
    if text.isdigit() and int(text) > 0:
        return "full", int(text)
    taker.note("approximated", "torchtitan keeps attention and every other product; here what is cheap is computed "
               "again, products are kept", "activation_checkpoint.selective_ac_option")  # fmt: skip
    return "selective", 1


def _precision(taker: Taker) -> str:
    kind = taker.word("precision", "training.mixed_precision_param",
                      choices={"bfloat16": "bf16", "float32": "fp32"}, default="bf16")  # fmt: skip
    if taker.word("dtype", "training.dtype", choices={"float32": 0, "bfloat16": 1}, default=0):
        kind = "bf16 alone"
    halved = taker.word("reduce", "training.mixed_precision_reduce", choices={"float32": 0, "bfloat16": 1}, default=0)
    if halved and kind != "bf16 alone":
        taker.note("no equivalent", "gradients are summed in float32 here, twice the bytes",
                   "training.mixed_precision_reduce")  # fmt: skip
    converters = taker.given("model.converters")
    if converters is not None and any(word in str(converters.value) for word in ("float8", "mx", "fp8")):
        taker.note("no equivalent", "products in 8 bits: planned in bfloat16, which is slower", "model.converters")
    elif converters is not None and converters.value not in ([], ""):
        taker.note("unknown", "a converter that autopar does not know", "model.converters")
    return str(kind)


def _optimizer(taker: Taker) -> str:
    known = {"AdamW": "adamw", "Adam": "adam"}
    found = taker.given("optimizer.name")
    if found is None or str(found.value) in known:
        return known[str(found.value)] if found else "adamw"
    taker.note("no equivalent", "another optimizer: planned with AdamW's state and work", "optimizer.name")
    return "adamw"


def _model(taker: Taker) -> ModelSizes | None:
    name = str(taker.word("model_name", "model.name", default="llama3"))
    found = taker.given("model.flavor")
    sizes = flavor(name, str(found.value) if found else "debugmodel")
    if sizes is None:
        known = "; ".join(f"{one}: {', '.join(flavors)}" for one, flavors in FLAVORS.items())
        taker.note("unknown", f"a flavor whose sizes autopar does not know (known are {known}): give --model",
                   "model.flavor")  # fmt: skip
    elif found is not None:
        taker.where["model"] = found
    if sizes is not None and name == "qwen3":
        taker.note("approximated", "norms of queries and keys are left out", "model.name")
    return sizes


# Writing ----------------------------------------


def changes(old: TrainingJob, new: TrainingJob, file: JobFile) -> dict[str, Any]:
    """What to write so that the file says the new job: values by key."""
    found: dict[str, Any] = {
        f"{_P}data_parallel_replicate_degree": _copies(new),
        f"{_P}data_parallel_shard_degree": new.sharding_ranks if new.zero else 1,
        f"{_P}tensor_parallel_degree": new.tp, f"{_P}context_parallel_degree": new.cp,
        f"{_P}pipeline_parallel_degree": new.pp, "training.seq_len": new.seq,
        _key(file, "micro_batch", "training.local_batch_size"): new.micro_batch,
        "training.global_batch_size": new.global_batch,
        f"{_P}fsdp_reshard_after_forward": "never" if new.zero == 2 else "always",
    }  # fmt: skip
    if new.pp > 1:
        names = {ours: theirs for theirs, ours in SCHEDULES.items() if theirs not in _OTHER_SCHEDULES}
        found[f"{_P}pipeline_parallel_schedule"] = names[new.schedule]
        found[f"{_P}pipeline_parallel_microbatch_size"] = new.pipeline_micro_batch
        if "chunks" in file.where and new.model is not None:
            found[_EACH] = -(-(new.model.layers + sum(new.end_weights or ())) // (new.pp * new.chunks))
    if (new.recompute, new.recompute_every) != (old.recompute, old.recompute_every):
        found["activation_checkpoint.mode"] = new.recompute
        if new.recompute == "selective":
            found["activation_checkpoint.selective_ac_option"] = "op"
    return found


def _copies(job: TrainingJob) -> int:
    return job.ranks_of_data // job.sharding_ranks if job.zero else job.ranks_of_data


def _key(file: JobFile, field: str, default: str) -> str:
    return file.where[field].key if field in file.where else default
