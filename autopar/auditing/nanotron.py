"""nanotron's YAML: read, and the changes that say another job in it."""

from __future__ import annotations

from typing import Any

from autopar.auditing.flavors import sizes_of
from autopar.auditing.job import JobFile, ModelSizes, TrainingJob
from autopar.auditing.taking import Taker, beside, missing
from autopar.auditing.values import yaml_values

FORM = "yaml"
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "tie_word_embeddings", "head_dim", "hidden_act")  # fmt: skip
_M, _P, _T = "model.model_config.", "parallelism.", "tokens."

KNOWN = [
    *missing("recomputation of the layers with experts alone", f"{_P}moe_layer_recompute"),
    *missing("attention in a sliding window", f"{_M}sliding_window_size", f"{_M}window_size"),
    *missing("products in 8 bits", "fp8*", "model.fp8*", f"{_M}fp8*"),
    *missing("a mask of attention's blocks", f"{_M}flex_attention_mask"),
    *missing("a loss on the logits' sum", f"{_M}z_loss_enabled"),
    *missing("domains that are weighed anew", "doremi.*"),
    *beside("checkpoints.*", "data_stages", "data_stages.*", "data.*", "general.*", "lighteval*", "logging.*",
        "profiler*",
            "s3_upload*", "tokenizer.*", "metrics_logging*", "optimizer.learning_rate_scheduler.*",
            "optimizer.clip_grad",
            "optimizer.weight_decay*", "optimizer.*adam*", "optimizer.optimizer_factory.*", "model.init_method.*",
            "tokens.limit_*", "tokens.train_steps", "tokens.val_check_interval"),
    *beside("model.ddp_bucket_cap_mb", why="buckets of gradients are sized here"),
    *beside(f"{_M}rope_*", f"{_M}*_token_id", f"{_M}rms_norm_eps", f"{_M}initializer_range", f"{_M}is_*_config",
            f"{_M}pretraining_tp", f"{_M}use_cache", f"{_M}max_position_embeddings", f"{_M}z_loss_*",
            f"{_M}rope_interleaved", f"{_M}interleaved_rotary", f"{_M}moe_config", f"{_M}_*attn_implementation",
            f"{_M}attention_bias", f"{_M}no_rope_layer", f"{_M}_use_qkv_packed", f"{_M}_fused_*"),
]  # fmt: skip


def read(name: str, text: str) -> JobFile:
    """A YAML configuration as a job."""
    taker = Taker(name, text, yaml_values(text, name))
    tp = taker.whole("tp", f"{_P}tp", default=1)
    cp = taker.whole("cp", f"{_P}context_parallel_size", f"{_P}cp", default=1)
    zero = taker.whole("zero", "optimizer.zero_stage", default=0, least=0)
    mode = taker.word("sequence_parallel", f"{_P}tp_mode",
                      choices={"ALL_REDUCE": False, "REDUCE_SCATTER": True}, default=False)  # fmt: skip
    full = taker.true("recompute", f"{_P}recompute_layer")
    pp = taker.whole("pp", f"{_P}pp", default=1)
    taker.given(f"{_P}pp_engine")
    _notes(taker, tp)
    job = TrainingJob(
        "nanotron", _model(taker, tp), data=taker.whole("data", f"{_P}dp", default=1), zero=zero, tp=tp,
        sequence_parallel=bool(mode) and tp > 1, pp=pp, cp=cp, context="ring",
        schedule=_schedule(taker) if pp > 1 else "1f1b",
        ep=taker.whole("ep", f"{_P}expert_parallel_size", default=1),
        micro_batch=taker.whole("micro_batch", f"{_T}micro_batch_size", default=1),
        accumulation=taker.whole("accumulation", f"{_T}batch_accumulation_per_replica", default=1),
        seq=taker.whole("seq", f"{_T}sequence_length"), recompute="full" if full else "none",
        precision=_precision(taker), optimizer=_optimizer(taker), overlaps_sums=zero == 0,
    )  # fmt: skip
    return taker.file(job, KNOWN)


def _schedule(taker: Taker) -> str:
    """All forward passes, then all backward ones, where the file does not say (ParallelismArgs)."""
    choices = {"1f1b": "1f1b", "afab": "gpipe"}
    return str(taker.word("schedule", f"{_P}pp_engine", choices=choices, default="gpipe"))


def _notes(taker: Taker, tp: int) -> None:
    if taker.true("async", f"{_P}tp_linear_async_communication") and tp > 1:
        taker.note("approximated", "gathers and sums of tensor parallelism are taken to be in the open",
                   f"{_P}tp_linear_async_communication")  # fmt: skip
    if taker.true("regathers", f"{_P}tp_recompute_allgather", default=True) and tp > 1:
        taker.note("approximated", "what sequence parallelism gathers is planned as the cost model likes it: kept, or "
                   "gathered again", f"{_P}tp_recompute_allgather")  # fmt: skip
    if not taker.true("sums32", "optimizer.accumulate_grad_in_fp32", default=True):
        taker.note("approximated", "gradients and masters are planned in float32, which take more",
                   "optimizer.accumulate_grad_in_fp32")  # fmt: skip


def _precision(taker: Taker) -> str:
    kinds = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
    found = taker.given("model.dtype")
    if found is None or str(found.value) not in kinds:
        if found is not None:
            taker.note("no equivalent", "planned in bfloat16", "model.dtype")
        return "bf16"
    if found.value == "float16":
        taker.note("approximated", "planned in bfloat16, which takes as long and as much", "model.dtype")
    return kinds[str(found.value)]


def _optimizer(taker: Taker) -> str:
    found = taker.given("optimizer.optimizer_factory.name")
    kinds = {"adamw": "adamw", "sgd": "sgd", "adam": "adam"}
    if found is None:
        return "adamw"
    if str(found.value).lower() not in kinds:
        taker.note("no equivalent", "another optimizer: planned with AdamW's state and work", found.key)
        return "adamw"
    return kinds[str(found.value).lower()]


def _model(taker: Taker, tp: int) -> ModelSizes | None:
    told: dict[str, Any] = {}
    for key in _SIZES:
        found = taker.given(_M + key)
        if found is not None:
            told[key] = found.value
            taker.where[f"model.{key}"] = found
    if "num_hidden_layers" not in told:
        return None
    if f"{_M}num_hidden_layers" in taker.values:
        taker.where["model"] = taker.values[f"{_M}num_hidden_layers"]
    told |= _experts(taker)
    multiple = taker.whole("padding", "model.make_vocab_size_divisible_by", default=1) * tp
    vocab = told.get("vocab_size")
    if isinstance(vocab, int) and vocab % multiple:
        told["vocab_size"] = -(-vocab // multiple) * multiple
        taker.note("approximated", f"padded to {told['vocab_size']:,}", f"{_M}vocab_size")
    return sizes_of(told, taker.name)


def _experts(taker: Taker) -> dict[str, Any]:
    names = {"num_experts": ("num_experts", "moe_num_experts"), "num_experts_per_tok": ("top_k",
        "num_experts_per_token"),
             "moe_intermediate_size": ("moe_intermediate_size",)}  # fmt: skip
    found = {ours: taker.given(*(f"{_M}moe_config.{name}" for name in theirs)) for ours, theirs in names.items()}
    return {ours: item.value for ours, item in found.items() if item is not None}


# Writing ----------------------------------------


def changes(old: TrainingJob, new: TrainingJob, file: JobFile) -> dict[str, Any]:
    """What to write so that the file says the new job: values by key."""
    found: dict[str, Any] = {
        f"{_P}dp": new.data, f"{_P}tp": new.tp, f"{_P}pp": new.pp, "optimizer.zero_stage": new.zero,
        f"{_T}micro_batch_size": new.micro_batch, f"{_T}batch_accumulation_per_replica": new.accumulation,
        f"{_P}tp_mode": "REDUCE_SCATTER" if new.sequence_parallel else "ALL_REDUCE",
    }  # fmt: skip
    if new.pp > 1:
        found[f"{_P}pp_engine"] = {"1f1b": "1f1b", "gpipe": "afab"}[new.schedule]
    if new.cp != old.cp:
        found[f"{_P}context_parallel_size"] = new.cp
    if (new.recompute == "full") != (old.recompute == "full"):
        found[f"{_P}recompute_layer"] = new.recompute == "full"
    if new.tp == 1:
        found.pop(f"{_P}tp_mode")
    return found
