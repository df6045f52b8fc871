"""Which options of Hugging Face's Trainer a plan leaves without a meaning, and what to do instead.

They are refused: an option that is silently ignored trains something else than what the script says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from autopar.runtime import ProgramError

_PRECISION = 'the plan says in which precision is computed: options={"precision": "bf16"} of the trainer'
_PLAN = "the plan says how devices share the work"
_RECOMPUTE = 'the plan says what is computed again: plan={…, "recompute": "full"}, or a constraint'
_LOSS = "put it into the model's forward, so that it is planned"
_MODEL = "prepare the model before it is given to the trainer"

#: by name of an argument, what to do instead; any value but None, False, 0, "" and empty ones is refused
REFUSED = {
    "bf16": _PRECISION, "fp16": _PRECISION, "bf16_full_eval": _PRECISION, "fp16_full_eval": _PRECISION,
    "activation_checkpointing": _RECOMPUTE, "gradient_checkpointing": _RECOMPUTE,
    "torch_compile": "the program is compiled by rank.compile, outside of the trainer",
    "use_liger_kernel": _MODEL, "neftune_noise_alpha": _LOSS,
    "auto_find_batch_size": "a plan is for one batch", "deepspeed": _PLAN, "fsdp": _PLAN, "parallelism_config": _PLAN,
    "ddp_find_unused_parameters": _PLAN, "ddp_bucket_cap_mb": _PLAN, "ddp_broadcast_buffers": _PLAN,
    "ddp_static_graph": _PLAN, "optim_target_modules": "name parameters in optimizer_cls_and_kwargs",
    "eval_use_gather_object": "each process has all outputs",
    "enable_jit_checkpoint": "save every few steps", "debug": "debug the model in one process",
    "save_on_each_node": "all ranks must see one folder",
}  # fmt: skip

#: arguments of which a test holds that a run under a plan is one process's
TESTED = frozenset({
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "adam_beta1", "adam_beta2",
    "adam_epsilon", "weight_decay", "max_grad_norm", "gradient_accumulation_steps", "label_smoothing_factor",
    "logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "seed", "data_seed", "dataloader_drop_last", "label_names",
    "remove_unused_columns", "include_num_input_tokens_seen", "train_sampling_strategy",
    "average_tokens_across_devices", "prediction_loss_only", "use_cpu", "resume_from_checkpoint", "save_only_model",
    "disable_tqdm", "report_to",
})  # fmt: skip

#: what Trainer does by itself, beside the model's passes, and so alike on each process
BESIDE = {
    "a callback's or logger's, on the first process": """log_on_each_node log_level log_level_replica run_name project
        trackio_space_id trackio_bucket_id trackio_static_space_id logging_nan_inf_filter skip_memory_metrics
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision""",
    "the loader's, of the whole batch": """dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order length_column_name
        ignore_data_skip accelerator_config""",
    "the optimizer's, of the rank's parameters": "optim_args",
    "torch's, in the whole process": "tf32 full_determinism torch_empty_cache_steps ddp_backend ddp_timeout",
    "made of outputs that are whole on each process": """eval_do_concat_batches eval_accumulation_steps
        include_for_metrics batch_eval_metrics""",
    "set on the model before it is planned": "use_cache",
    "the callbacks' state, in the checkpoint": "restore_callback_states_from_checkpoint",
    "without effect unless the argument that it is for is given, which is refused": """activation_checkpointing_kwargs
        gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode liger_kernel_config fsdp_config""",
    "the script's, or the launcher's": "do_train do_eval do_predict local_rank",
}  # fmt: skip

_HOOKED_OPTIMIZERS = ("galore", "lomo", "apollo", "bnb", "8bit", "4bit", "layerwise")
_LOADING = {"split_batches": False, "dispatch_batches": None, "even_batches": True}


def check_arguments(args: Any) -> None:
    """Raises ProgramError that names each option of TrainingArguments which has no meaning under a plan, or of which
    nobody knows whether it has: of a later version of transformers, say."""
    _refuse("TrainingArguments", [*_of_arguments(args), *_unknown(args)])


def _unknown(args: Any) -> Iterator[str]:
    known = REFUSED.keys() | TESTED | {name for names in BESIDE.values() for name in names.split()}
    for field in dataclasses.fields(args):
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in known and _is_of_transformers(args, field.name):
            value = getattr(args, field.name, usual)
            if value != usual:
                yield f"{field.name}={value!r} (what it does under a plan is not known)"


def _is_of_transformers(args: Any, name: str) -> bool:
    """Whether it is Trainer's, and not one that a subclass has for its own trainer, as Seq2SeqTrainingArguments has."""
    owner = next(kind for kind in type(args).__mro__[::-1] if name in getattr(kind, "__annotations__", {}))
    return owner.__module__ == "transformers.training_args"


def _of_arguments(args: Any) -> Iterator[str]:
    for name, remedy in REFUSED.items():
        if value := getattr(args, name, None):
            yield f"{name}={value!r} ({remedy})"
    if args.train_sampling_strategy == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance' (each rank has the whole batch)"
    if any(word in str(args.optim).lower() for word in _HOOKED_OPTIMIZERS):
        yield f"optim={str(args.optim)!r} (it keeps states or steps of its own by layer; take one of torch.optim)"
    for name, usual in _LOADING.items():
        if (value := getattr(args.accelerator_config, name)) != usual:
            yield f"accelerator_config {name}={value!r} (each rank has the whole batch)"
    if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        yield "accelerator_config sync_each_batch=True (the plan says when gradients are summed)"


def check_trainer(trainer: Any, model_init: Any) -> None:
    """Raises ProgramError that names what was given to the trainer itself and cannot be done under a plan."""
    found = {
        "model_init": (model_init, "give the model"),
        "compute_loss_func": (trainer.compute_loss_func, _LOSS),
        "optimizers": (trainer.optimizer, "made of the model's parameters, which are not the ranks': take "
                       "optimizer_cls_and_kwargs"),
        "optimizers[1]": (trainer.lr_scheduler, "take lr_scheduler_type"),
    }  # fmt: skip
    told = [f"{name} ({remedy})" for name, (value, remedy) in found.items() if value is not None]
    kind = type(trainer.model)
    if kind.__module__.split(".")[0] == "peft":
        told.append("a PeftModel (its adapters are saved apart from its weights; train it in a loop of your own)")
    if getattr(trainer.model, "hf_device_map", None) or getattr(trainer.model, "hf_quantizer", None):
        told.append("a model with a device map or quantized weights (load it whole, in a floating-point dtype)")
    _refuse("the trainer", told)


def _refuse(what: str, told: list[str]) -> None:
    if told:
        raise ProgramError(f"expected of {what} what can be done under a plan, found {'; '.join(told)}")
