"""Label smoothing, which Trainer computes from a model's outputs, as a part of what is planned."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother


class SmoothedLoss(nn.Module):
    """A model with Trainer's smoothed loss in the place of its own: it is not given the labels, as Trainer does not.

    Parameters and buffers have the model's names.
    """

    def __init__(self, model: nn.Module, smoother: LabelSmoother, takes_count: bool) -> None:
        """takes_count: whether the model is given the number of labels of all accumulated batches."""
        super().__init__()
        self.__dict__.update(
            _modules=model._modules, _parameters=model._parameters, _buffers=model._buffers, _model=model,
            _smoother=smoother, _takes_count=takes_count, config=getattr(model, "config", None),
            _shifts=type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        )  # fmt: skip
        self.training = model.training

    _model: nn.Module
    _smoother: LabelSmoother
    _takes_count: bool
    _shifts: bool

    def forward(self, labels: Tensor, num_items_in_batch: Tensor | None = None, **inputs: Any) -> dict[str, Any]:
        """The model's outputs, and the loss."""
        if self._takes_count and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        outputs = self._model(**inputs)
        loss = self._smoother(outputs, labels, shift_labels=self._shifts, num_items_in_batch=num_items_in_batch)
        if isinstance(outputs, dict):
            return {"loss": loss, **{name: value for name, value in outputs.items() if name != "loss"}}
        return {"loss": loss, **{str(index): value for index, value in enumerate(outputs)}}

    def train(self, mode: bool = True) -> SmoothedLoss:
        """The model's mode, too."""
        self._model.train(mode)
        self.training = mode
        return self
