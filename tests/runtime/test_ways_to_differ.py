"""A rank that differs in its program, versions, weights or batch is named within ten seconds, in more than ten ways.

Each way is a job of its own, of two processes that torch's environment variables describe, as torchrun starts them.
"""

from __future__ import annotations

import re
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.rank_pool import _free_port, server
from tests.runtime.ways import WAYS, tell

SECONDS, PATIENCE_S = 10.0, 200.0


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
    """What the ranks of a job are told."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    ranks = [_started({**world, "RANK": rank, "LOCAL_RANK": rank}, folder, way) for rank in ("0", "1")]
    try:
        return [pipe.recv() if pipe.poll(PATIENCE_S) else "nothing in time" for _, pipe in ranks]
    finally:
        for process, pipe in ranks:
            process.join(1.0)
            process.kill()
            process.join()
            pipe.close()


def _started(variables: dict[str, str], folder: Path, way: str) -> tuple[BaseProcess, Connection]:
    ours, theirs = server().Pipe(duplex=False)
    process = server().Process(target=tell, args=(variables, folder, way, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


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
    assert all(text == "told nothing" for text in told(folders[plan], ""))
