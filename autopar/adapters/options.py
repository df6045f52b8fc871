"""Which options of Hugging Face's Trainer a plan leaves without a meaning, and what to do instead.

They are refused: an option that is silently ignored trains something else than what the script says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.runtime import ProgramError

_PRECISION = 'the plan says in which precision is computed: options={"precision": "bf16"} of the trainer'
_PLAN = "the plan says how devices share the work"
_RECOMPUTE = 'the plan says what is computed again: plan={…, "recompute": "full"}, or a constraint'
_LOSS = "put it into the model's forward, so that it is planned"
_MODEL = "prepare the model before it is given to the trainer"

#: by name of an argument, what to do instead; any value but None, False, 0, "" and empty ones is refused
_ARGUMENTS = {
    "bf16": _PRECISION, "fp16": _PRECISION, "bf16_full_eval": _PRECISION, "fp16_full_eval": _PRECISION,
    "activation_checkpointing": _RECOMPUTE, "gradient_checkpointing": _RECOMPUTE,
    "torch_compile": "the program is compiled by rank.compile, outside of the trainer",
    "use_liger_kernel": _MODEL, "neftune_noise_alpha": _LOSS, "label_smoothing_factor": _LOSS,
    "auto_find_batch_size": "a plan is for one batch", "deepspeed": _PLAN, "fsdp": _PLAN, "parallelism_config": _PLAN,
    "ddp_find_unused_parameters": _PLAN, "ddp_bucket_cap_mb": _PLAN, "ddp_broadcast_buffers": _PLAN,
    "ddp_static_graph": _PLAN, "optim_target_modules": "name parameters in optimizer_cls_and_kwargs",
    "eval_use_gather_object": "each process has all outputs",
    "enable_jit_checkpoint": "save every few steps", "debug": "debug the model in one process",
    "save_on_each_node": "all ranks must see one folder",
}  # fmt: skip

_HOOKED_OPTIMIZERS = ("galore", "lomo", "apollo", "bnb", "8bit", "4bit", "layerwise")
_LOADING = {"split_batches": False, "dispatch_batches": None, "even_batches": True}


def check_arguments(args: Any) -> None:
    """Raises ProgramError that names each option of TrainingArguments which has no meaning under a plan."""
    _refuse("TrainingArguments", list(_of_arguments(args)))


def _of_arguments(args: Any) -> Iterator[str]:
    for name, remedy in _ARGUMENTS.items():
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
