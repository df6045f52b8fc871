"""A rank that differs in its program, versions, weights or batch is named within ten seconds, in more than ten ways.

Each way is a job of its own, of two processes that torch's environment variables describe, as torchrun starts them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.rank_pool import _free_port
from tests.runtime.ways import WAYS

ROOT = Path(__file__).parents[2]
SECONDS = 10.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh() * self.scale)
        return (out - y).pow(2).mean()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs for two ranks: of dp, with one of tp beside it, and the other way round."""
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    mesh, root = autopar.Mesh("h100", devices_per_node=2), tmp_path_factory.mktemp("programs")
    plans = {name: autopar.template_plan(model, mesh, batch, **{name: 2}) for name in ("dp", "tp")}  # type: ignore[arg-type]
    for name, other in (("dp", "tp"), ("tp", "dp")):
        autopar.parallelize(model, mesh, batch, plan=plans[name]).save(root / name)
        autopar.parallelize(model, mesh, batch, plan=plans[other]).save(root / name / "other")
    return {name: root / name for name in plans}


def told(folder: Path, way: str) -> list[str]:
    """What the ranks print of a job."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **world, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/runtime/ways.py"), str(folder), way]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True, cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [rank.communicate(timeout=200)[0] for rank in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_differ_are_named(way: str, folders: dict[str, Path]) -> None:
    sharded = way in ("another part of the same rows", "buffer set by hand")  # rows are on both ranks of tp alone
    for text in told(folders["tp" if sharded else "dp"], way):
        found = re.search(r"told after ([\d.]+) s: expected .*", text)
        assert found, text
        assert re.search(WAYS[way], found[0]), found[0]
        assert float(found[1]) < SECONDS, found[0]


@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_ranks_that_agree_are_told_nothing(plan: str, folders: dict[str, Path]) -> None:
    assert all(text.endswith("told nothing\n") for text in told(folders[plan], ""))
