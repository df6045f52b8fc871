"""What is written down of the audited decoder is what its trace finds, to the name and the source line."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from autopar.auditing.decoder import built
from autopar.auditing.frameworks import read_file
from autopar.auditing.job import ModelSizes, TrainingJob
from autopar.auditing.legality import faults
from autopar.auditing.result import Audit, audit
from autopar.auditing.writer import source_line
from autopar.auditing.written import written
from autopar.ir.graph import Graph
from autopar.trace import trace
from benchmarks.audit.cases import CASES, AuditCase

LLAMA = ModelSizes(layers=2, hidden=32, heads=4, kv_heads=2, head_size=8, ffn=48, vocab=100)
GPT = replace(LLAMA, kv_heads=4, is_gated=False, norm="layer", positions="learned", has_bias=True, is_tied=True)
EXPERTS = replace(LLAMA, experts=4, chosen_experts=2, expert_ffn=24)
KINDS = {
    "llama": (LLAMA, "bf16", False),
    "as many key/value heads, its masters alone": (replace(LLAMA, kv_heads=4), "bf16 alone", False),
    "tied, in float32": (replace(LLAMA, is_tied=True), "fp32", False),
    "tied, as many key/value heads, compiled": (replace(LLAMA, is_tied=True, kv_heads=4), "bf16", True),
    "one key/value head": (replace(LLAMA, kv_heads=1, layers=5), "bf16", False),
    "layer norms": (replace(LLAMA, norm="layer"), "bf16", False),
    "layer norms, as many key/value heads": (replace(LLAMA, norm="layer", kv_heads=4), "bf16", False),
    "gpt": (GPT, "bf16", False),
    "more positions than are read": (replace(GPT, max_positions=64), "fp32", False),
    "squared relu, no positions": (replace(GPT, activation="squared_relu", positions="none"), "bf16", False),
    "gelu by tanh": (replace(LLAMA, activation="gelu_tanh", is_gated=False), "bf16 alone", True),
    "experts": (EXPERTS, "bf16", False),
    "experts, tied": (replace(EXPERTS, is_tied=True), "bf16", False),
    "experts, as many key/value heads": (replace(EXPERTS, kv_heads=4), "bf16", False),
    "one expert a token": (replace(EXPERTS, chosen_experts=1, is_gated=False, norm="layer"), "bf16 alone", False),
    "experts of squared relu": (replace(EXPERTS, is_gated=False, activation="squared_relu"), "bf16", False),
    "experts of gelu by tanh": (replace(EXPERTS, is_gated=False, activation="gelu_tanh"), "bf16", True),
}


def traced(sizes: ModelSizes, precision: str, is_compiled: bool) -> Graph:
    model, inputs = built(sizes, 4, 16, is_compiled)
    model = model.to(torch.bfloat16) if precision == "bf16 alone" else model
    return trace(model, inputs, mode="train", compute_dtype=torch.bfloat16 if precision == "bf16" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_a_trace_finds(kind: str) -> None:
    sizes, precision, is_compiled = KINDS[kind]
    found, expected = written(sizes, 4, 16, precision, is_compiled), traced(sizes, precision, is_compiled)
    assert found.nodes == expected.nodes
    assert found == expected and found.fingerprint == expected.fingerprint


class EnoughError(Exception):
    """What was asked for is known."""


def job_of(case: AuditCase) -> TrainingJob:
    """Of a public configuration, without its prediction."""
    told = list[TrainingJob]()

    def tell(found: Audit) -> None:
        told.append(found.job)
        raise EnoughError

    with contextlib.suppress(EnoughError):
        audit(case.path, case.mesh, case.model_path, search=None, tell=tell, **case.given)
    return told[0]


def structure(sizes: ModelSizes) -> tuple[object, ...]:
    """What decides which operators there are."""
    kind = sizes.is_gated, sizes.norm, sizes.positions, sizes.has_bias, sizes.is_tied, sizes.experts > 0
    return *kind, sizes.heads == sizes.kv_heads


def test_every_layer_of_the_public_configurations_is_among_these() -> None:
    structures = {structure(sizes) for sizes, _, _ in KINDS.values()}
    for job in (job_of(case) for case in CASES if case.expected != "refused"):
        assert job.model is not None and structure(job.model) in structures
        assert job.precision in {precision for _, precision, _ in KINDS.values()}


def test_a_line_is_found_by_its_text_or_not_at_all() -> None:
    assert source_line("decoder.py", "return F.cross_entropy").startswith("auditing/decoder.py:")
    with pytest.raises(ValueError, match="not enough values"):
        source_line("decoder.py", "no such text")
    with pytest.raises(ValueError, match="too many values"):
        source_line("decoder.py", "return")


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    case = next(case for case in CASES if case.file == "megatron_mixtral.sh")
    job, file = job_of(case), read_file(case.path, None)[0]
    assert job.model is not None and faults(file, job) == []
    few = replace(job, model=replace(job.model, experts=2, chosen_experts=3))
    assert [fault.expected for fault in faults(file, few)] == ["from 1 to 2 of them chosen by a token"]
