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

CACHE = "cache"
"""The name of the module that has the cached keys and values, `cache.LAYER.keys` and `cache.LAYER.values`."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


class CachedLayer(nn.Module):
    """Keys and values of one layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)


class CachedDecoder(nn.Module):
    """A decoder of transformers that reads and writes a cache. Its parameters and modules have the decoder's own names.

    The decoder itself is not changed. Raises PlanError for a model that takes no cache, or attends in a way that masks
    by position do not say.
    """

    def __init__(self, model: nn.Module, max_batch: int, max_length: int) -> None:
        super().__init__()
        config = checked_config(model)
        dtype, device = _dtype_of(model)
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        shape = (max_batch, heads, max_length, head_dim(config))
        cache = nn.ModuleList(CachedLayer(shape, dtype, device) for _ in range(layers))
        if CACHE in model._modules:
            raise PlanError(f"expected a decoder without a module {CACHE!r} of its own, found one; rename it")
        self.__dict__.update(_decoder=model, max_batch=max_batch, max_length=max_length, _layer_kinds=kinds_of(config))
        self.__dict__["_parameters"] = dict(model._parameters)
        self.__dict__["_buffers"] = dict(model._buffers)
        self.__dict__["_modules"] = {**model._modules, CACHE: cache}
        self.training = False

    _decoder: nn.Module
    _layer_kinds: tuple[str, ...]
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
        out = type(self._decoder).forward(
            self._decoder, input_ids=tokens, attention_mask=self._masks(positions), position_ids=positions,
            past_key_values=rows, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = out.logits
        return logits[:, -1]

    def _masks(self, positions: Tensor) -> Any:
        """Of each kind of layer, which keys a query sees: (batch, 1, steps, length)."""
        config: Any = self._decoder.config
        keys = torch.arange(self.max_length, device=positions.device)[None, None, None]
        queries = positions[:, None, :, None]
        seen = {_FULL: keys <= queries}
        if _SLIDING in self._layer_kinds:
            seen[_SLIDING] = seen[_FULL] & (keys > queries - config.sliding_window)
        if config._attn_implementation == "eager":  # which adds its mask to scores
            dtype, _ = _dtype_of(self._decoder)
            lowest = torch.finfo(dtype).min
            seen = {kind: torch.where(mask, 0.0, lowest).to(dtype) for kind, mask in seen.items()}
        wanted = {kind: seen[kind] for kind in dict.fromkeys(self._layer_kinds)}
        return wanted if len(wanted) > 1 else next(iter(wanted.values()))


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
    sizes = [name for name in ("num_key_value_heads", "num_hidden_layers", "num_attention_heads", "hidden_size")
             if getattr(config, name, None) is None]  # fmt: skip
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


def kinds_of(config: Any) -> tuple[str, ...]:
    """Of each layer, which keys its queries see. Raises PlanError for another kind than all before, or a window."""
    found = getattr(config, "layer_types", None)
    if found is None:
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        found = [_FULL if window is None else _SLIDING] * config.num_hidden_layers
    others = sorted(set(found) - {_FULL, _SLIDING})
    if others:
        raise PlanError(
            f"expected layers of full or sliding attention, found {', '.join(others)}, whose state is no cache of keys "
            "and values by position; serve the model by its own framework"
        )
    return tuple(found)


def head_dim(config: Any) -> int:
    """Elements of a key."""
    found = getattr(config, "head_dim", None)
    return int(found) if found is not None else int(config.hidden_size) // int(config.num_attention_heads)


def _dtype_of(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    first = next(iter(model.parameters()))
    return first.dtype, first.device
