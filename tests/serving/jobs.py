"""What ranks do with a served program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.program import load_source
from autopar.runtime.serving import Server, sampler


def server(source: str, state: Mapping[str, Tensor], max_length: int) -> Server:
    """This rank's."""
    from autopar import runtime as rt

    rank = rt.build(load_source(source).Program)
    rank.init_from(state, broadcast=False)
    return Server(rank, max_length)


def generate(
    rank: int, world: int, source: str, state: Mapping[str, Tensor], max_length: int, prompts: Sequence[Sequence[int]],
    new: int, eos: int | None,
) -> list[list[int]]:  # fmt: skip
    """The tokens after each prompt."""
    return server(source, state, max_length).generate(prompts, new, eos_token_id=eos)


def sample(
    rank: int, world: int, source: str, state: Mapping[str, Tensor], max_length: int, prompts: Sequence[Sequence[int]],
    new: int,
) -> list[list[int]]:  # fmt: skip
    """The same, drawn; every rank has another generator, of which the first rank's counts."""
    choose = sampler(torch.Generator().manual_seed(7 + rank), temperature=2.0, top_k=9)
    return server(source, state, max_length).generate(prompts, new, choose=choose)


def slots(
    rank: int, world: int, source: str, state: Mapping[str, Tensor], max_length: int, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:  # fmt: skip
    """Steps by hand: a slot is filled while another waits between its steps, and refilled. The logits of each."""
    own = server(source, state, max_length)
    found = {"first": own.prefill({1: prompts[1]})[1]}
    found["second"] = own.prefill({3: prompts[0]})[3]
    found["third"] = own.decode({1: 5})[1]
    own.release([3])
    found["refilled"] = own.prefill({3: prompts[2]})[3]
    both = own.decode({1: 6, 3: 7})
    found["fourth"], found["after"] = both[1], both[3]
    return found


def peaks(
    rank: int, world: int, source: str, state: Mapping[str, Tensor], max_length: int, batch: int, lengths: Sequence[int]
) -> tuple[list[int], list[dict[str, int]]]:  # fmt: skip
    """Of steps of these columns: the most bytes that torch held, but for what it was given; bytes that it sent."""
    from autopar import runtime as rt
    from benchmarks.accuracy.lifetimes import live_storages, track

    given = [
        {
            "tokens": torch.zeros(batch, steps, dtype=torch.int64), "starts": torch.zeros(batch, dtype=torch.int64),
            "lengths": torch.full((batch,), steps, dtype=torch.int64),
        }
        for steps in lengths
    ]  # fmt: skip
    before = live_storages()
    own = server(source, state, max_length)
    held, sent = list[int](), list[dict[str, int]]()
    for steps, inputs in zip(lengths, given, strict=True):
        program = own._decode if steps == 1 else own._prefill[steps]
        program(**inputs)
        with rt.count_bytes() as counted:
            program(**inputs)
        held.append(track(partial(program, **inputs), before).peak_bytes)
        kinds = Counter[str]()
        for key, size in counted.items():
            kinds[key[0] if isinstance(key, tuple) else key] += size
        sent.append({kind: size for kind, size in kinds.items() if size})
    return held, sent
