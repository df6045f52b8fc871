"""One script for Hugging Face's Trainer, run in one process with theirs and on ranks with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, TrainingArguments

from autopar.adapters.transformers import Trainer

LENGTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.ln(x)))))


class Net(nn.Module):
    """A loss over tokens that labels keep, over the number that the trainer says where it does: as models of
    transformers compute it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.config = PretrainedConfig()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None, **_: Any
    ) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        reduction = "mean" if num_items_in_batch is None else "sum"
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Samples of which labels leave out unlike numbers of tokens."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(61, (count, LENGTH), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(count, LENGTH, generator=generator) < 0.3, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(**{**usual, **changed})


def of_two_lengths(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads each batch to its own length: of every second, half of the tokens are left out first."""
    count = LENGTH if samples[0]["input_ids"][0] % 2 else LENGTH // 2
    return {name: torch.stack([sample[name][:count] for sample in samples]) for name in samples[0]}


class WeightedLoss:
    """Another loss by the batch, of the model's: weighted, with a margin that it is not counted below."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        loss = (outputs["loss"] * 0.7 - 0.5).relu() + 0.1 * outputs["loss"].square()
        return (loss, outputs) if return_outputs else loss


class TwiceLoss:
    """Half the loss of the batch, and half that of the batch with its samples' tokens turned around."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        turned = {name: value.flip(1) for name, value in inputs.items()}
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        other = model(**turned, num_items_in_batch=num_items_in_batch)
        loss = 0.5 * outputs["loss"] + 0.5 * other["loss"]
        return (loss, outputs) if return_outputs else loss


class SuperLoss:
    """What Trainer makes, and more."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)  # type: ignore[misc]
        return (2 * loss, outputs) if return_outputs else 2 * loss


class LogitsLoss:
    """A loss of its own making: of logits."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


class AuxLoss:
    """Of a part of the outputs that the model may have."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"]
        if outputs.get("aux_loss") is not None:
            loss = loss + outputs["aux_loss"]
        return (loss, outputs) if return_outputs else loss


class PenaltyLoss:
    """With a term of the parameters."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        squares = [parameter.square().sum() for parameter in model.parameters()]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in squares]
        loss = outputs["loss"] + 0.01 * sum(whole)
        return (loss, outputs) if return_outputs else loss


class OtherModelLoss:
    """Of the model that the trainer was given, not of what it calls."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = self.model(**inputs)  # type: ignore[attr-defined]
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class DetachedLoss:
    """Without gradients."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"].detach().requires_grad_()
        return (loss, outputs) if return_outputs else loss


LOSSES: dict[str, type] = {
    one.__name__: one
    for one in (WeightedLoss, TwiceLoss, SuperLoss, LogitsLoss, AuxLoss, PenaltyLoss, OtherModelLoss, DetachedLoss)
}


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return Net(dropout)


def reset() -> None:
    """Accelerate's singletons are those of a process; scripts are run one after the other in ours."""
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def accuracy(found: Any) -> dict[str, float]:
    """Of tokens that labels keep."""
    kept = found.label_ids != -100
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[kept].mean())}


def run(
    folder: Path, plan: Any = None, *, resume: str | None = None, dropout: float = 0.0, train: bool = True,
    changed: dict[str, Any] | None = None, metrics: bool = False, pads: bool = False, loss: str = "",
) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Tensor]]:  # fmt: skip
    """The trainer's log, an evaluation at the end, and the weights that `save_model` has written."""
    from safetensors.torch import load_file

    reset()
    kind: Any = transformers.Trainer if plan is None else Trainer
    kind = type("OwnTrainer", (LOSSES[loss], kind), {}) if loss else kind
    own = {} if plan is None else {"plan": plan, "options": {"check": False}}
    if pads:
        own |= {} if plan is None else {"shapes": [dict.fromkeys(("input_ids", "labels"), (4, length))
                                                   for length in (LENGTH // 2, LENGTH)]}  # fmt: skip
        own["data_collator"] = of_two_lengths
    trainer = kind(
        model=model(dropout), args=arguments(folder, **(changed or {})), train_dataset=Rows(11, 0),
        eval_dataset=Rows(6, 1), **own,
    )  # fmt: skip
    if metrics:
        trainer.compute_metrics = accuracy
        trainer.evaluate()  # by the weights before training
    if train:
        trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()
    if metrics:
        found = trainer.predict(Rows(7, 2))
        evaluated |= {"predictions": torch.tensor(found.predictions), **found.metrics}
    trainer.save_model(str(folder / "trained"))
    weights = load_file(folder / "trained" / "model.safetensors")
    return trainer.state.log_history, evaluated, weights


def job(rank: int, world: int, *args: Any, **kwargs: Any) -> Any:
    """`run` on a rank of the pool."""
    named = args[-1] if isinstance(args[-1], dict) and "named" in args[-1] else None
    if named is not None:
        args, kwargs = args[:-1], named["named"]
    return run(*args, **kwargs)
