"""A decoder with its cache held against the decoder as it is: whether cache, masks and positions tell all it needs."""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import TraceError
from autopar.serving.cached import CachedDecoder, checked_config

_MOST_POSITIONS = 96
_LONGEST = 1024  # of a cache: longer than what windows that masks do not say are wide, such as GPT-Neo's 256
_SINGLE = 5  # tokens that are decoded one by one, after two chunks
_MOST_FLOPS = 5e11  # some ten seconds of a core


@torch.no_grad()
def held_against_decoder(model: nn.Module, max_length: int) -> str:
    """What came of running prompts in chunks and token by token, beside whole sequences without a cache. Raises
    TraceError where they differ, naming at which position."""
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return "no, the weights are on meta"
    total = min(max_length, _MOST_POSITIONS)
    if 2 * sum(x.numel() for x in model.parameters()) * 2 * (2 + _SINGLE) * total > _MOST_FLOPS:
        return "no, the model is too large to be run here"
    was_training = model.training
    model.eval()
    try:
        return _held(model, total, min(max_length, _LONGEST))
    finally:
        model.train(was_training)


def _held(model: nn.Module, total: int, length: int) -> str:
    """length: of the cache, longer than sequences are: what layers make of it shows."""
    device, config = next(iter(model.parameters())).device, checked_config(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(config.vocab_size), (2, total), generator=generator).to(device)
    decoder, starts = CachedDecoder(model, 2, length), torch.zeros(2, dtype=torch.int64, device=device)
    chunk = max(1, (total - _SINGLE) // 2)
    while int(starts[0]) + 1 < total:  # the second sequence comes later, and goes slower
        steps = chunk if int(starts[0]) + chunk <= total - _SINGLE else 1
        lengths = torch.tensor([steps, 0 if not starts[0] else max(1, steps // 2)], device=device)
        rows = torch.zeros(2, steps, dtype=torch.int64, device=device)
        for row, length in enumerate(lengths.tolist()):
            at = int(starts[row])
            rows[row, steps - length :] = tokens[row, at : at + length]
        found = decoder(rows, starts, lengths)
        starts = starts + lengths
        for row, length in enumerate(lengths.tolist()):
            if length:
                _compare(model, tokens[row : row + 1, : int(starts[row])], found[row])
    return "yes"


def _compare(model: nn.Module, tokens: torch.Tensor, found: torch.Tensor) -> None:
    expected = model(input_ids=tokens, use_cache=False).logits[0, -1]
    gap = (expected.double() - found.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    allowed = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    if not float(gap) <= allowed:
        raise TraceError(
            f"expected {type(model).__name__} to make the same logits with a cache of keys and values as of the whole "
            f"sequence, found a difference of {float(gap):.2g} of the largest at position {tokens.shape[1] - 1}: its "
            "layers depend on more than keys, values, masks and positions; serve it by its own framework"
        )
