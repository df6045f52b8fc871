"""Several ranks generate what one device does, token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from autopar import Mesh
from autopar.emit import emit
from autopar.program import load_source
from autopar.runtime.serving import Server
from autopar.serving.planning import ServedLayout, StepGraph, Steps, planned_steps, traced_steps, without_gradients
from autopar.serving.program import state_of
from tests.rank_pool import RankPool
from tests.serving import jobs
from tests.serving.decoders import LENGTH, decoder, generated, prompts

BATCH, CHUNK, NEW = 4, 8, 8


@cache
def traced(name: str) -> dict[int, StepGraph]:
    with without_gradients(decoder(name)):
        return traced_steps(decoder(name), BATCH, LENGTH, (CHUNK,), check=False)


@cache
def planned(name: str, layout: ServedLayout) -> tuple[Steps, str]:
    count = layout.dp * layout.tp * layout.pp
    steps = planned_steps(traced(name), decoder(name), Mesh("cpu", devices_per_node=count), layout)
    return steps, emit(*steps.decode, list(steps.prefill.values()))


CASES = [
    ("llama", ServedLayout(tp=2)),
    ("qwen3", ServedLayout(tp=2)),
    ("llama_wide", ServedLayout(tp=4)),
    ("qwen3_wide", ServedLayout(tp=4)),
    ("llama", ServedLayout(tp=4)),
    ("llama", ServedLayout(dp=2, tp=2)),
    ("qwen3", ServedLayout(dp=2, tp=2)),
    ("llama", ServedLayout(pp=2)),
    ("qwen3", ServedLayout(pp=2)),
    ("qwen3", ServedLayout(tp=2, pp=2)),
    ("mixtral", ServedLayout(dp=2, ep=2)),
    ("mistral", ServedLayout(dp=2)),
    ("qwen3_mixed", ServedLayout(tp=2)),
    ("gpt2", ServedLayout(tp=2)),
    ("latent", ServedLayout(tp=2)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: str(value).replace(" × ", ","))
def test_ranks_generate_what_one_device_does(
    name: str, layout: ServedLayout, rank_pool: Callable[[int], RankPool]
) -> None:  # fmt: skip
    """Prompts shorter and longer than a chunk, more of them than slots, some ended early."""
    given, source = prompts(), planned(name, layout)[1]
    expected = generated(decoder(name), given, NEW)
    eos = expected[0][3]
    expected = generated(decoder(name), given, NEW, eos)
    world = layout.dp * layout.tp * layout.pp
    for found in rank_pool(world).run(jobs.generate, source, state_of(decoder(name)), LENGTH, given, NEW, eos):
        assert found == expected
    assert len({len(tokens) for tokens in expected}) > 1


def test_slots_do_not_know_of_each_other(rank_pool: Callable[[int], RankPool]) -> None:
    """A sequence that waits while others are filled, refilled and decoded goes on as if it were alone."""
    model, given = decoder("qwen3"), prompts()
    source, state = planned("qwen3", ServedLayout(dp=2, tp=2))[1], state_of(model)
    sequences = {
        "first": given[1], "second": given[0], "third": [*given[1], 5], "refilled": given[2],
        "fourth": [*given[1], 5, 6], "after": [*given[2], 7],
    }  # fmt: skip
    with torch.no_grad():
        expected = {key: model(input_ids=torch.tensor([own])).logits[0, -1] for key, own in sequences.items()}
    for found in rank_pool(4).run(jobs.slots, source, state, LENGTH, given):
        for key, logits in expected.items():
            torch.testing.assert_close(found[key], logits, rtol=1e-4, atol=1e-5)


def test_what_the_first_rank_draws_holds_for_all(rank_pool: Callable[[int], RankPool]) -> None:
    source, state = planned("llama", ServedLayout(tp=2))[1], state_of(decoder("llama"))
    first, second = rank_pool(2).run(jobs.sample, source, state, LENGTH, prompts(), NEW)
    assert first == second
    assert first != generated(decoder("llama"), prompts(), NEW)


@pytest.mark.parametrize("layout", [ServedLayout(tp=2), ServedLayout(pp=2)], ids=str)
def test_no_step_takes_more_memory_or_sends_other_bytes_than_predicted(
    layout: ServedLayout, rank_pool: Callable[[int], RankPool]
) -> None:
    """The cache is written in place: it is held once."""
    (steps, source), state = planned("qwen3", layout), state_of(decoder("qwen3"))
    plans = {1: steps.decode[1]} | {n: plan for n, (_, plan) in steps.prefill.items()}
    constants = sum(plan.predicted.memory.get("constants", 0) for plan in plans.values())
    results = rank_pool(2).run(jobs.peaks, source, state, LENGTH, BATCH, list(plans))
    for number, plan in enumerate(plans.values()):
        held = max(held[number] for held, _ in results)
        assert held <= plan.predicted.peak_bytes + constants
        assert held > 0.75 * plan.predicted.peak_bytes
        most = max((sent[number] for _, sent in results), key=lambda kinds: sum(kinds.values()))
        assert most == dict(plan.predicted.comm_bytes)
    assert steps.peak_bytes <= max(plan.predicted.peak_bytes for plan in plans.values()) + constants


def test_one_device_serves_too() -> None:
    """Without process groups."""
    source = planned("llama", ServedLayout())[1]
    from autopar import runtime as rt

    rank = rt.build(load_source(source).Program)
    rank.init_from(state_of(decoder("llama")) or {}, broadcast=False)
    assert Server(rank, LENGTH).generate(prompts(), NEW) == generated(decoder("llama"), prompts(), NEW)
