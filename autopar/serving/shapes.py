"""What each layer of a decoder caches, found by running it without data: heads, and widths of keys and values.

Configurations do not say it alike: GPT-2's have no number of key/value heads, and values of multi-head latent attention
are narrower than keys. The decoder's own calls of its cache do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.errors import PlanError
from autopar.serving.masks import masks_of

_STEPS = 2
_HALF = torch.bfloat16  # grouped products of experts run without data in this type alone


class CachedShape(NamedTuple):
    """Of a layer."""

    heads: int
    key_width: int
    value_width: int


@torch.no_grad()
def cached_shapes(model: nn.Module) -> tuple[CachedShape, ...]:
    """Of each layer, in order. Raises PlanError for a model that does not ask its cache once for each of its layers."""
    config: Any = model.config
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = {name: x.detach().to("meta", _HALF if x.is_floating_point() else x.dtype) for name, x in named}
    positions = torch.zeros(1, _STEPS, dtype=torch.int64, device="meta")
    asked = _AskedCache()
    given = {
        "input_ids": positions, "attention_mask": masks_of(config, positions, _STEPS, _HALF),
        "position_ids": positions, "past_key_values": asked, "use_cache": True, "logits_to_keep": 1,
    }  # fmt: skip
    try:
        functional_call(model, tensors, kwargs=given, tie_weights=False)
    except PlanError:
        raise
    except Exception as error:  # whatever a model of others does where it has no data
        return _told_shapes(model, error)
    return _in_order(model, asked.found)


def _in_order(model: nn.Module, found: dict[int, list[CachedShape]]) -> tuple[CachedShape, ...]:
    layers = int(getattr(model.config, "num_hidden_layers", 0))
    if sorted(found) != list(range(layers)) or any(len(shapes) > 1 for shapes in found.values()):
        told = ", ".join(f"{layer} {len(found.get(layer, []))} times" for layer in range(max([layers, *found])))
        raise PlanError(
            f"expected {type(model).__name__} to cache keys and values once in each of {layers} layers, found layers "
            f"{told or 'that cache nothing'}; serve it by its own framework"
        )
    return tuple(found[layer][0] for layer in range(layers))


def _told_shapes(model: nn.Module, error: Exception) -> tuple[CachedShape, ...]:
    """As a configuration says it, of a model that needs data to run."""
    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", None)
    if heads is None:
        raise PlanError(
            f"expected to find what {type(model).__name__} caches by running it without data, or a "
            f"config.num_key_value_heads, found neither: {type(error).__name__}: {error}; serve it by its own framework"
        ) from error
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // int(config.num_attention_heads)
    return (CachedShape(int(heads), int(width), int(width)),) * int(config.num_hidden_layers)


class _AskedCache:
    """What layers of transformers call a cache, which keeps nothing but shapes."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self) -> None:
        self.found: dict[int, list[CachedShape]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Those that it is given."""
        own = CachedShape(keys.shape[1], keys.shape[3], values.shape[3])
        self.found.setdefault(layer_idx, []).append(own)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """As of an empty cache."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Those of the mask that is given."""
        return _STEPS, 0

    def get_max_cache_shape(self, *_: Any) -> int:
        """As many as there are."""
        return _STEPS
