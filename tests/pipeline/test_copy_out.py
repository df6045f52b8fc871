"""The search's choice of blocks whose activations wait on the host: only where allowed, and where it is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import pipeline
from autopar.cost.host_memory import HostMemory
from autopar.cost.profile import profile_to_json
from autopar.cost.provenance import Provenance
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.profiler import template_profile
from autopar.trace import trace
from models import gpt

BUDGET = autopar.SearchBudget(substitutions=False, proposals=0)
CONFIG = gpt.Config(num_layers=6, hidden_size=128, num_heads=4, seq_len=128, vocab_size=256, batch_size=8)


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return gpt.build(CONFIG)


@cache
def graph() -> Graph:
    return trace(model(), gpt.example_inputs(CONFIG))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> autopar.Mesh:
    """Two ranks beside a fast link."""
    host = HostMemory(2**34, 5e10, 5e10, 0, Provenance("assumed", "a link of this test", "2026-11-27"), None, True)
    data = profile_to_json(replace(template_profile(), host_memory=host, _shared={}))
    file = Path(tmp_path_factory.mktemp("profile")) / "fast-link.json"
    file.write_text(json.dumps(data))
    return autopar.Mesh(str(file), devices_per_node=2)


def searched(mesh: autopar.Mesh, limit: int | None, *allow: str, stages: int = 1) -> Plan:
    rules = (autopar.Constraint(stages=stages),)
    with mock.patch.object(pipeline, "trace", lambda *_, **__: graph()):
        return autopar.parallelize(
            model(), mesh, gpt.example_inputs(CONFIG), memory_limit=limit, constraints=rules, search=BUDGET,
            allow=allow, check=False,
        ).plan  # fmt: skip


def test_chosen_where_allowed_and_faster_than_computing_again(mesh: autopar.Mesh) -> None:
    """Under a limit that asks for something: never without being allowed."""
    free = searched(mesh, None)
    limit = (free.predicted.peak_bytes + template_of_graph(
        graph(), mesh, dp=2, zero=3, recompute="full").predicted.peak_bytes) // 2  # fmt: skip
    plain, allowed = searched(mesh, limit), searched(mesh, limit, "offload")
    assert not plain.copied_out and (plain.recompute or plain.microbatches > 1)
    assert allowed.predicted.peak_bytes <= limit
    assert allowed.predicted.step_time_ns <= plain.predicted.step_time_ns
    assert allowed.copied_out or any(kept.on_host for kept in allowed.stage.storage.values())


def test_nothing_is_copied_where_memory_does_not_ask_for_it(mesh: autopar.Mesh) -> None:
    free = searched(mesh, None, "offload")
    assert not free.copied_out and free.stages == searched(mesh, None).stages
