"""The example with Ray Serve: windows by rate, requests that are checked, answers; and behind it, where it is there."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import InfeasibleError
from tests.serving.decoders import LENGTH, VOCABULARY, decoder, prompts

ROOT = Path(__file__).parents[2]
NEW = 4


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_ray_serve", ROOT / "examples" / "ray_serve.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program() -> autopar.serving.ServedProgram:
    mesh = autopar.Mesh("cpu", devices_per_node=1)
    return autopar.serve(decoder("llama"), mesh, max_batch=3, max_length=LENGTH, prompt_lengths=[8], check=False)


def request_ns(program: autopar.serving.ServedProgram) -> int:
    """Of a prompt of 8 with its new tokens, as predicted."""
    own = program.latency
    assert own.decode is not None
    return own.prefill[8].upper_ns + (NEW - 1) * own.decode.upper_ns


def test_windows_hold_the_bound_at_the_rate_that_is_measured(example: Any, program: Any) -> None:
    taken_ns = request_ns(program)
    table = example.window_table(program, 8, NEW, 5 * taken_ns / 1e6)
    assert all(one.worst_ns <= 5 * taken_ns and one.batch == 3 for one in table)
    arrivals, gap_s = example.Arrivals(table), 1 / table[2].rate_s
    assert arrivals.at(0.0) == table[0], "of one request there is no rate"
    assert [arrivals.at(n * gap_s * 1.001) for n in range(1, 4)][-1] == table[2]
    for n in range(200):
        last = arrivals.at(3 * gap_s * 1.001 + n * 1e-9)
    assert last == table[-1], "more than it can take"
    with pytest.raises(InfeasibleError):
        example.window_table(program, 8, NEW, taken_ns / 1e6)


def test_a_replica_answers_what_generate_does_and_refuses_what_is_no_prompt(example: Any, program: Any) -> None:
    table = example.window_table(program, 8, NEW, 1e6)
    replica = example.Replica(program, table, NEW, VOCABULARY)
    asked = [replica.checked({"tokens": prompt}) for prompt in prompts((3, 11, 5, 1))]
    assert replica.answers(asked) == [generated(prompt) for prompt in asked]
    wrong = ([], {}, {"tokens": []}, {"tokens": [VOCABULARY]}, {"tokens": [True]}, {"tokens": [1] * (LENGTH - NEW + 2)})
    for body in wrong:
        with pytest.raises(ValueError, match="tokenize the text"):
            replica.checked(body)
    assert len(replica.answers([replica.checked({"tokens": [1] * (LENGTH - NEW + 1)})])[0]) == NEW


def generated(prompt: list[int]) -> list[int]:
    """By transformers, on one device."""
    import torch

    own = torch.tensor([prompt])
    made = decoder("llama").generate(own, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.whole
def test_behind_ray_serve(example: Any, tmp_path: Path) -> None:
    serve: Any = pytest.importorskip("ray.serve", reason="ray[serve] is not installed", exc_type=ImportError)
    decoder("llama").save_pretrained(tmp_path)
    arguments = f"--model {tmp_path} --batch 3 --length {LENGTH} --prompt 8 --new-tokens {NEW} --bound-ms 1e6"
    serve.run(example.application(example.parsed(arguments.split())))
    try:
        for prompt in prompts((3, 5)):
            body = json.dumps({"tokens": prompt}).encode()
            with urllib.request.urlopen(urllib.request.Request("http://localhost:8000", body)) as answer:
                assert json.load(answer) == {"tokens": generated(prompt)}
    finally:
        serve.shutdown()
