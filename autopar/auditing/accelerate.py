"""Accelerate's YAML (FSDP, DeepSpeed, Megatron-LM, parallelism of several kinds): read, and the changes that say
another
job in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.auditing import deepspeed
from autopar.auditing.job import OF_A_NODE, JobFile, TrainingJob
from autopar.auditing.taking import Taker, beside, missing
from autopar.auditing.values import FileValue, yaml_values

FORM = "yaml"
_F, _D, _N, _S = (
    "fsdp_config.",
    "parallelism_config.parallelism_config_",
    "megatron_lm_config.megatron_lm_",
    "deepspeed_config.",
)
_STRATEGIES = {"FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False), "HYBRID_SHARD": (3, True),
               "HYBRID_SHARD_ZERO2": (2, True)}  # fmt: skip
_NUMBERED = dict(zip("12345", _STRATEGIES.values(), strict=True))

KNOWN = [
    *missing("parameters and the optimizer's state on the host: planned as if all were on the device",
             f"{_F}fsdp_offload_params", f"{_S}offload_*_device", "fsdp_config.fsdp_cpu_offload"),
    *missing("products in 8 bits", "fp8_config*"),
    *missing("a compiled model's own settings", "dynamo_config.dynamo_mode"),
    *missing("experts that are DeepSpeed's own", f"{_S}deepspeed_moe_layer_cls_names"),
    *beside(*(f"{_F}fsdp_{name}" for name in (
        "auto_wrap_policy", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch",
        "cpu_ram_efficient_loading",
        "state_dict_type", "sync_module_states", "use_orig_params", "version", "transformer_layer_cls_to_wrap",
        "min_num_params", "limit_all_gathers")), why="how FSDP wraps, prefetches or saves"),
    *beside(*(_S + name for name in (
        "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model")), why="how DeepSpeed starts or saves"),
    *beside(f"{_N}gradient_clipping", f"{_N}other_*", "dynamo_config.*", f"{_D}cp_config*", f"{_D}*_handler*"),
    *beside("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_process_*",
            "main_training_function", "rdzv_backend", "same_network", "tpu_*", "use_cpu", "gpu_ids", "ipex_config*",
            "command_file", "commands", "num_cpu_threads_per_process", "mpirun_config*", "aws_*", "ec2_*", "monitor_*",
            "max_restarts", "fsdp_config", "megatron_lm_config", "deepspeed_config", "dynamo_config",
            "use_parallelism_config"),
    *missing("tensor parallelism as older Accelerate configured it", "tp_config*", off=(1, {}, None)),
]  # fmt: skip


def read(name: str, text: str) -> JobFile:
    """A YAML configuration as a job. Accelerate's files name no model, batch or length."""
    taker = Taker(name, text, yaml_values(text, name))
    kind = taker.word("kind", "distributed_type", default="NO", choices={
        "FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron", "MULTI_GPU": "ddp", "NO": "one",
        "no": "one",
        "MULTI_CPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp",
    })  # fmt: skip
    readers = {"fsdp": _fsdp, "deepspeed": _deepspeed, "megatron": _megatron}
    job = readers[kind](taker) if kind in readers else TrainingJob("accelerate")
    job = _degrees(taker, job)
    job = replace(job, precision=_precision(taker, job), accumulation=job.accumulation or taker.whole(
        "accumulation", "gradient_accumulation_steps"))  # fmt: skip
    return taker.file(_devices(taker, job), KNOWN)


def _devices(taker: Taker, job: TrainingJob) -> TrainingJob:
    nodes = taker.whole("nodes", "num_machines", default=1)
    processes = taker.whole("per_node", "num_processes")
    if processes is not None and processes % nodes:
        raise taker.wrong(taker.where["per_node"], f"a multiple of num_machines ({nodes})")
    return replace(job, nodes=nodes if processes else None, per_node=processes // nodes if processes else None)


def _precision(taker: Taker, job: TrainingJob) -> str:
    found = taker.word("precision", "mixed_precision", default=None,
                       choices={"no": "fp32", "False": "fp32", "bf16": "bf16", "fp16": "fp16",
                           "fp8": "fp8"})  # fmt: skip
    if found == "fp16":
        taker.note("approximated", "fp16 is planned as bfloat16, which takes as long and as much", "mixed_precision")
    if found == "fp8":
        taker.note("no equivalent", "products in 8 bits: planned in bfloat16, which is slower", "mixed_precision")
    return job.precision if found is None else "fp32" if found == "fp32" else "bf16"


def _fsdp(taker: Taker) -> TrainingJob:
    version = taker.whole("version", f"{_F}fsdp_version", default=1)
    found = taker.given(f"{_F}fsdp_sharding_strategy")
    zero, is_hybrid = 3, False
    if found is not None and version > 1:
        taker.note("does not matter", "version 2 of FSDP asks fsdp_reshard_after_forward alone", found.key)
        found = None
    if found is not None:
        strategies = {**_STRATEGIES, **_NUMBERED}
        if str(found.value) not in strategies:
            raise taker.wrong(found, f"one of {', '.join(_STRATEGIES)}")
        zero, is_hybrid = strategies[str(found.value)]
        taker.where["zero"] = found
    reshards = taker.given(f"{_F}fsdp_reshard_after_forward")
    if found is None and reshards is not None:
        zero, is_hybrid = _resharded(taker, reshards, version)
        taker.where["zero"] = found = reshards
    again = taker.true("recompute", f"{_F}fsdp_activation_checkpointing")
    job = TrainingJob("accelerate", zero=zero, recompute="full" if again else "none")
    if is_hybrid and found is not None:
        taker.where["shard"] = found
        taker.note("assumed", "shards are those of a node", found.key)
        job = replace(job, shard=OF_A_NODE)
    return job


def _resharded(taker: Taker, found: FileValue, version: int) -> tuple[int, bool]:
    """ZeRO's stage, and whether it is that of a node, of what FSDP does with parameters behind the forward pass: true
    or false of version 2, a strategy's name of version 1."""
    text = str(found.value).upper()
    if version > 1:
        if text not in ("TRUE", "FALSE"):
            raise taker.wrong(found, "true or false, for version 2 of FSDP")
        return (3 if text == "TRUE" else 2), False
    if text in ("TRUE", "FALSE"):
        taker.fault("sharding", f"one of {', '.join(_STRATEGIES)} for version 1 of FSDP", found.value,
                    "add fsdp_version: 2", found.key)  # fmt: skip
        return 3, False
    if text not in _STRATEGIES:
        raise taker.wrong(found, f"one of {', '.join(_STRATEGIES)}")
    return _STRATEGIES[text]


def _deepspeed(taker: Taker) -> TrainingJob:
    job = deepspeed.job_of(taker, _S, "accelerate")
    other = taker.given(f"{_S}deepspeed_config_file")
    if other is not None:
        taker.note("unknown", "another file, which says the rest: audit that one, with --mesh", other.key)
    stage = taker.whole("zero", f"{_S}zero_stage", least=0, default=0 if other else 2)
    return replace(job, zero=stage, overlaps_sums=True)


def _megatron(taker: Taker) -> TrainingJob:
    zero = 1 if taker.true("zero", f"{_N}use_distributed_optimizer") else 0
    again = taker.true("recompute", f"{_N}recompute_activations")
    if again:
        taker.note("approximated", "only attention's own products are computed again, which fused attention does "
                   "anyhow: planned as no recomputation", f"{_N}recompute_activations")  # fmt: skip
    tp = taker.whole("tp", f"{_N}tp_degree", default=1)
    return TrainingJob(
        "accelerate", zero=zero, tp=tp, pp=taker.whole("pp", f"{_N}pp_degree", default=1),
        sequence_parallel=taker.true("sequence_parallel", f"{_N}sequence_parallelism") and tp > 1,
        accumulation=taker.whole("accumulation", f"{_N}num_micro_batches"), overlaps_sums=False,
    )  # fmt: skip


def _degrees(taker: Taker, job: TrainingJob) -> TrainingJob:
    """The job with what a ParallelismConfig says: what it does not say is 1, but DeepSpeed counts its ranks itself."""
    is_said = any(key.startswith(_D) for key in taker.values) and _kind(taker) != "DEEPSPEED"
    tp = taker.whole("tp", f"{_D}tp_size", default=job.tp)
    cp = taker.whole("cp", f"{_D}cp_size", default=1)
    heads = taker.whole("cp", f"{_D}sp_size", default=1) if cp == 1 else 1
    taker.given(f"{_D}sp_size")
    shard = taker.whole("shard", f"{_D}dp_shard_size", default=1 if is_said else job.shard)
    replicate = taker.whole("replicate", f"{_D}dp_replicate_size", default=1 if is_said else job.replicate)
    if is_said:
        _check_degrees(taker, {"tp": tp, "cp": cp, "dp_shard": shard, "dp_replicate": replicate})
    if is_said and shard == replicate == tp == cp == 1:
        shard = replicate = None  # all ranks hold copies
    taker.given(f"{_D}cp_backend", f"{_D}sp_backend")
    return replace(job, tp=tp, cp=max(cp, heads), context="heads" if heads > 1 else "gather", shard=shard,
                   replicate=replicate, sequence_parallel=job.sequence_parallel)  # fmt: skip


def _kind(taker: Taker) -> str:
    return str(taker.where["kind"].value) if "kind" in taker.where else "NO"


def _check_degrees(taker: Taker, degrees: Mapping[str, int]) -> None:
    """What Accelerate's ParallelismConfig refuses of its degrees, beside their product."""
    keys = {name: f"{_D}{name}_size" for name in degrees}
    sharded = max(degrees["dp_shard"], degrees["cp"])
    if (taker.whole("sp", f"{_D}sp_size", default=1)) > 1 and degrees["cp"] > 1:
        taker.fault("degrees", "cp_size or sp_size", "both", "set one to 1", keys["cp"], f"{_D}sp_size")
    if max(degrees["tp"], degrees["cp"]) > 1 and degrees["dp_replicate"] > 1 and degrees["dp_shard"] == 1:
        taker.fault("degrees", "dp_shard_size above 1 beside dp_replicate_size and tp_size or cp_size", 1,
                    "shard among the replicas instead", keys["dp_replicate"], keys["dp_shard"])  # fmt: skip
    if _kind(taker) != "FSDP":
        return
    if taker.whole("version", f"{_F}fsdp_version", default=1) == 1:
        taker.fault("degrees", "version 2 of FSDP beside parallelism_config", 1, "add fsdp_version: 2",
                    f"{_F}fsdp_version", *keys.values())  # fmt: skip
    if sharded == 1:
        taker.fault("degrees", "dp_shard_size or cp_size above 1, among which FSDP shards", 1,
                    "another distributed_type, or more shards", keys["dp_shard"], keys["cp"])  # fmt: skip


# Writing ----------------------------------------


def changes(old: TrainingJob, new: TrainingJob, file: JobFile) -> dict[str, Any]:
    """What to write so that the file says the new job: values by key."""
    kind = file.where["kind"].value if "kind" in file.where else "NO"
    if kind == "DEEPSPEED":
        return {f"{_S}zero_stage": new.zero, f"{_S}gradient_accumulation_steps": new.accumulation}
    if kind == "MEGATRON_LM":
        return {f"{_N}tp_degree": new.tp, f"{_N}pp_degree": new.pp, f"{_N}num_micro_batches": new.microbatches,
                f"{_N}sequence_parallelism": new.sequence_parallel}  # fmt: skip
    if kind != "FSDP":
        return {}
    found: dict[str, Any] = {f"{_F}fsdp_activation_checkpointing": new.recompute == "full"}
    if "zero" in file.where and file.where["zero"].key.endswith("reshard_after_forward"):
        found[f"{_F}fsdp_reshard_after_forward"] = new.zero == 3
    else:
        found[f"{_F}fsdp_sharding_strategy"] = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: "NO_SHARD"}[new.zero]
    if any(key in file.where for key in ("replicate", "cp")):
        found |= {f"{_D}dp_replicate_size": new.ranks_of_data // new.sharding_ranks, f"{_D}tp_size": new.tp,
                  f"{_D}dp_shard_size": new.sharding_ranks, f"{_D}cp_size": new.cp}  # fmt: skip
    return found
