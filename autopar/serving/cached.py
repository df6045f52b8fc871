"""A decoder with a cache of the keys and values of its positions: the module that is traced for serving.

    forward(tokens, starts, lengths) → logits of each sequence's last token

tokens: (batch, steps); starts: (batch,), how many positions of each sequence are cached; lengths: (batch,), how many of
its tokens are new, 0 for a sequence that waits. New tokens are at the end of a row: column `t` has number `r(t) = (t +
length) mod steps` and position `start + r`, and is new where r < length. So the logits of the last column are those
that are asked for, whatever the lengths, and every decoder of transformers can leave out the others
(`logits_to_keep=1`). Columns that are not new write nothing, and what they compute is read by nobody.

Keys and values are (batch, key/value heads, length, head dim), transformers' `StaticCache`: a buffer each a layer, of
which `ops.caches` writes the new rows in place. A query sees the keys up to its own position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ops.caches import write_rows
from autopar.serving.masks import kinds_of, masks_of
from autopar.serving.shapes import CachedShape, cached_shapes

CACHE = "cache"
"""The name of the module that has the cached keys and values, `cache.LAYER.keys` and `cache.LAYER.values`."""


class CachedLayer(nn.Module):
    """Keys and values of one layer."""

    keys: Tensor
    values: Tensor

    def __init__(
        self, batch: int, length: int, shape: CachedShape, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        super().__init__()
        for name, width in (("keys", shape.key_width), ("values", shape.value_width)):
            rows = torch.zeros(batch, shape.heads, length, width, dtype=dtype, device=device)
            self.register_buffer(name, rows, persistent=False)


class CachedDecoder(nn.Module):
    """A decoder of transformers that reads and writes a cache. Its parameters and modules have the decoder's own names.

    The decoder itself is not changed. Raises PlanError for a model that takes no cache, or attends in a way that masks
    by position do not say.
    """

    def __init__(self, model: nn.Module, max_batch: int, max_length: int) -> None:
        super().__init__()
        checked_config(model)
        dtype, device = _dtype_of(model)
        shapes = cached_shapes(model)
        cache = nn.ModuleList(CachedLayer(max_batch, max_length, shape, dtype, device) for shape in shapes)
        if CACHE in model._modules:
            raise PlanError(f"expected a decoder without a module {CACHE!r} of its own, found one; rename it")
        self.__dict__.update(_decoder=model, max_batch=max_batch, max_length=max_length)
        self.__dict__["_parameters"] = dict(model._parameters)
        self.__dict__["_buffers"] = dict(model._buffers)
        self.__dict__["_modules"] = {**model._modules, CACHE: cache}
        self.training = False

    _decoder: nn.Module
    cache: nn.ModuleList
    max_batch: int
    max_length: int

    def forward(self, tokens: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """The logits of each sequence's last new token: (batch, vocabulary)."""
        steps = tokens.shape[1]
        number = torch.remainder(torch.arange(steps, device=tokens.device) + lengths[:, None], steps)
        is_new = number < lengths[:, None]
        positions = torch.remainder(starts[:, None] + number, self.max_length)
        rows = _StepCache(self.cache, positions, is_new, self.max_length)
        masks = masks_of(self._decoder.config, positions, self.max_length, _dtype_of(self._decoder)[0])
        out = type(self._decoder).forward(
            self._decoder, input_ids=tokens, attention_mask=masks, position_ids=positions,
            past_key_values=rows, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = out.logits
        return logits[:, -1]


class _StepCache:
    """What layers of transformers call a cache, of one step."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, cache: nn.ModuleList, positions: Tensor, is_new: Tensor, length: int) -> None:
        self._cache, self._positions, self._is_new, self._length = cache, positions, is_new, length

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new rows of a layer; returns all."""
        layer: Any = self._cache[layer_idx]
        for kept, rows in ((layer.keys, keys), (layer.values, values)):
            if (*rows.shape[:2], rows.shape[3]) != (*kept.shape[:2], kept.shape[3]):
                raise PlanError(
                    f"expected layer {layer_idx} to cache {kept.shape[1]} heads of {kept.shape[3]} elements, found "
                    f"{rows.shape[1]} of {rows.shape[3]}: serve it by its own framework"
                )
            kept.copy_(write_rows(kept, self._positions, rows, self._is_new))
        return layer.keys, layer.values

    def get_seq_length(self, *_: Any) -> int:
        """As of an empty cache: positions are given."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """How many keys there are, and from which on; masks are given."""
        return self._length, 0

    def get_max_cache_shape(self, *_: Any) -> int:
        """How many keys there may be."""
        return self._length


def checked_config(model: nn.Module) -> Any:
    """A decoder's config. Raises PlanError for what no cache of keys and values is made for."""
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(type(model).forward).parameters
    wanted = ("input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep")
    missing = [name for name in wanted if name not in takes]
    sizes = [name for name in ("num_hidden_layers", "num_attention_heads") if getattr(config, name, None) is None]
    if config is None or missing or sizes:
        lacks = f"no argument {missing[0]!r} of forward" if missing else f"no config.{sizes[0]}" if sizes else "none"
        raise PlanError(
            f"expected a causal decoder of transformers, whose forward takes {', '.join(wanted)}, found "
            f"{type(model).__name__} with {lacks}; give AutoModelForCausalLM's"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise PlanError(
            f'expected attention by "sdpa" or "eager", found {config._attn_implementation!r}, which takes no mask by '
            'position; load the model with attn_implementation="sdpa"'
        )
    kinds_of(config)
    return config


def _dtype_of(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    first = next(iter(model.parameters()))
    return first.dtype, first.device
