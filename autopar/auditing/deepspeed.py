"""DeepSpeed's JSON: read, and the changes that say another job in it."""

from __future__ import annotations

from typing import Any

from autopar.auditing.job import JobFile, TrainingJob
from autopar.auditing.taking import Taker, beside, missing
from autopar.auditing.values import json_values

FORM = "json"
_Z = "zero_optimization."
_HOST = "parameters or the optimizer's state outside of the device's memory: planned as if all were on it"
OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}

KNOWN = [
    *missing(_HOST, f"{_Z}offload_optimizer.device", f"{_Z}offload_param.device", f"{_Z}cpu_offload*"),
    *missing("gathers and sums in fewer bits (ZeRO++)", f"{_Z}zero_quantized_*"),
    *missing("parameters kept twice, in each node as well (ZeRO++)", f"{_Z}zero_hpz_partition_size", off=(1, None)),
    *missing("gradients kept, added up or sent in another type: planned as float32 sums",
             "communication_data_type", "seq_parallel_communication_data_type", "data_types.grad_accum_dtype",
             off=("fp32", None, "auto")),
    *missing("batches that follow the number of devices", "elasticity.enabled"),
    *missing("pipeline stages are cut in the model's code", "pipeline*"),
    *missing("a compressed model", "compression_training*", "quantize_training*"),
    *missing("attention over blocks", "sparse_attention*"),
    *missing("lengths or data that change as training goes on", "curriculum_learning.enabled",
        "data_efficiency.enabled",
             "progressive_layer_drop.enabled"),
    *missing("activations split over ranks of tensor parallelism, or kept on the host",
             "activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"),
    *missing("eigenvalues of blocks", "eigenvalue.enabled"),
    *missing("NVIDIA's apex", "amp.enabled"),
    *missing("compiled by DeepSpeed", "compile.deepcompile"),
    *missing("experts that are DeepSpeed's own", "moe*"),
    *beside("aio.*", f"{_Z}offload_optimizer.*", f"{_Z}offload_param.*",
        why="counts with what is kept outside of the device's memory"),
    *beside("optimizer.params*", "optimizer.legacy_fusion", "scheduler.*", "gradient_clipping",
            *(f"fp16.{name}" for name in ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window",
              "hysteresis", "min_loss_scale", "consecutive_hysteresis", "auto_cast", "fp16_master_weights_and_grads")),
            "bf16.enabled", "bfloat16.enabled", "bf16.immediate_grad_update",
            why="a number of the optimizer or of its loss scale"),
    *beside("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard*", "wandb*",
            "csv_monitor*", "comet*", "flops_profiler*", "autotuning*", "comms_logger*", "checkpoint*",
            "load_universal_checkpoint", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "seed",
            "elasticity.*", "monitor_config*", "dataloader_drop_last", "curriculum_learning.*", "data_efficiency.*",
            "progressive_layer_drop.*", "eigenvalue.*", "amp.*", "compile.*", "disable_allgather"),
    *beside(f"{_Z}reduce_bucket_size", f"{_Z}allgather_bucket_size", *(f"{_Z}stage3_{name}" for name in (
                "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold",
                "model_persistence_threshold", "gather_16bit_weights_on_model_save",
                "gather_fp16_weights_on_model_save", "use_all_reduce_for_fetch_params",
                "module_granularity_threshold")), f"{_Z}sub_group_size", f"{_Z}contiguous_gradients",
            f"{_Z}allgather_partitions", f"{_Z}reduce_scatter", f"{_Z}round_robin_gradients", f"{_Z}*elastic*",
            f"{_Z}load_from_fp32_weights", f"{_Z}ignore_unused_parameters", f"{_Z}memory_efficient_linear",
            f"{_Z}zero_hpz_*", f"{_Z}mics_*", f"{_Z}legacy_stage1",
            why="how DeepSpeed cuts what it sends, or when it frees it: sized here by the cost model"),
    *beside("activation_checkpointing.*",
        why="how activations are kept; that they are recomputed is said in the model"),
    *beside("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", why="a factor of the gradients"),
]  # fmt: skip


def read(name: str, text: str) -> JobFile:
    """A JSON configuration as a job. DeepSpeed's files name no model and no length."""
    taker = Taker(name, text, json_values(text, name))
    return taker.file(job_of(taker, ""), KNOWN)


def job_of(taker: Taker, prefix: str, framework: str = "deepspeed") -> TrainingJob:
    """The job that keys of DeepSpeed's say, which begin with `prefix` in another's file."""
    at = prefix
    zero = taker.whole("zero", f"{at}{_Z}stage", default=0, least=0)
    shards = taker.whole("shard", f"{at}{_Z}mics_shard_size", least=-1, absent=(-1, 0))
    if shards is not None and shards < 1:
        shards = None
    overlaps = taker.true("overlaps", f"{at}{_Z}overlap_comm", default=zero == 3)
    tp = taker.whole("tp", f"{at}tensor_parallel.autotp_size", default=1, absent=(0,))
    heads = taker.whole("cp", f"{at}sequence_parallel_size", default=1)
    micro = taker.whole("micro_batch", f"{at}train_micro_batch_size_per_gpu")
    times = taker.whole("accumulation", f"{at}gradient_accumulation_steps")
    whole = taker.whole("global_batch", f"{at}train_batch_size")
    if whole and not micro and not _is_auto(taker, f"{at}train_micro_batch_size_per_gpu"):
        times = times or 1  # of a batch alone, each rank's share is one micro batch (DeepSpeedConfig)
    return TrainingJob(
        framework, shard=shards, zero=zero, tp=tp, cp=heads, context="heads", micro_batch=micro, accumulation=times,
        global_batch=whole, precision=_precision(taker, at),
        optimizer=_optimizer(taker, at), overlaps_sums=overlaps,
    )  # fmt: skip


def _precision(taker: Taker, at: str) -> str:
    brain = taker.given(f"{at}bf16.enabled", f"{at}bfloat16.enabled")
    half = taker.given(f"{at}fp16.enabled")
    if half is not None and half.value is True and brain is not None and brain.value is True:
        taker.fault("precision", "fp16 or bf16", "both enabled", "enable one", half.key, brain.key)
    if half is not None and half.value is True:
        taker.where["precision"] = half
        taker.note("approximated", "fp16 is planned as bfloat16, which takes as long and as much", half.key)
        return "bf16"
    if brain is not None and brain.value is True:
        taker.where["precision"] = brain
        return "bf16"
    automatic = [key for key in ("bf16", "bfloat16", "fp16") if _is_auto(taker, f"{at}{key}.enabled")]
    if automatic:
        taker.note("assumed", "the trainer decides: bfloat16 is assumed", f"{at}{automatic[0]}.enabled")
        return "bf16"
    return "fp32"


def _is_auto(taker: Taker, key: str) -> bool:
    return key in taker.values and taker.values[key].value == "auto"


def _optimizer(taker: Taker, at: str) -> str:
    found = taker.given(f"{at}optimizer.type")
    if found is None:
        return "adamw"
    name = OPTIMIZERS.get(str(found.value).lower())
    if name is None:
        one_bit = "onebit" in str(found.value).lower() or "zeroone" in str(found.value).lower()
        why = "gradients sent in one bit" if one_bit else "another optimizer"
        taker.note("no equivalent", f"{why}: planned with AdamW's state, work and float32 sums", found.key)
    return name or "adamw"


# Writing ----------------------------------------


def changes(old: TrainingJob, new: TrainingJob, file: JobFile) -> dict[str, Any]:
    """What to write so that the file says the new job: values by key. Nothing where all stays open to the trainer."""
    found: dict[str, Any] = {f"{_Z}stage": new.zero, "train_micro_batch_size_per_gpu": new.micro_batch,
                             "gradient_accumulation_steps": new.accumulation}  # fmt: skip
    if "train_batch_size" in file.where:
        found["train_batch_size"] = new.global_batch
    if new.sharding_ranks != new.ranks_of_data:
        found[f"{_Z}mics_shard_size"] = new.sharding_ranks
    elif "shard" in file.where:
        found[f"{_Z}mics_shard_size"] = -1
    return found
