"""Pauses when nodes are lost for good and come back, beside what was predicted of them; losses beside one device.

    python -m benchmarks.elastic.run [--rounds 3]

Four nodes of one gloo rank each on this host, a torchrun each: two are killed with all that they keep, come back, then
one is killed, and comes back. Of four ranks, each alone has a quarter of the state (ZeRO-3), which the next mirrors; of
three and two, each has all. Written to results.md.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.ladders import Ladder, Rendezvous, Rung, save_elastic
from autopar.ladders.layouts import layout_of
from autopar.ladders.transitions import mirrored_bytes
from autopar.pipeline import graph_for
from benchmarks.facts import facts, write_record
from models import mlp
from tests.ladder.nodes import Nodes
from tests.runtime.test_lost_ranks import single_device

FILE = Path(__file__).with_name("results")
WIDTHS = (64, 1024, 1024, 16)
STEPS = 200
STEADY = 4  # steps from one change to the next: one is kept before the next ends
ZERO = {4: 3, 3: 0, 2: 0}


def ladder_of() -> tuple[Ladder, torch.nn.Module, Any]:
    """Rungs of four, three and two nodes."""
    torch.manual_seed(0)
    config = mlp.Config(WIDTHS, batch_size=24)
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    rungs = []
    for count, zero in ZERO.items():
        mesh = autopar.Mesh("cpu", nodes=count)
        plan = autopar.template_plan(model, mesh, inputs, dp=count, zero=zero)
        rungs.append(Rung(mesh, 24, plan, "given", laid_out=partial(layout_of, graph_for(plan, model, inputs), plan)))
    return Ladder("mlp", tuple(rungs)), model, inputs


def one_round(folder: Path, work: Path) -> list[dict[str, Any]]:
    """The log of a run in which nodes are killed and come back."""
    nodes = Nodes(folder, work, STEPS, 2, 4, step_s=0.5)
    try:
        nodes.start(0, 1, 2, 3)
        nodes.trains_on(4, STEADY)
        for killed, left in (((1, 3), 2), ((2,), 3)):
            nodes.kill(*killed)
            nodes.trains_on(left, STEADY)
            nodes.start(*killed)
            nodes.trains_on(4, STEADY)
        nodes.hurry()
        assert nodes.join() == [0] * 4
        return nodes.logged()
    finally:
        nodes.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ladder, model, inputs = ladder_of()
    lines, largest, record = list[str](), 0.0, []
    with tempfile.TemporaryDirectory() as place:
        folder = save_elastic(ladder, Path(place) / "ladder", model, inputs, rendezvous=Rendezvous(2, 4, 6))
        expected = single_device(folder, model, STEPS)
        for number in range(rounds):
            log = one_round(folder, Path(place) / f"round_{number}")
            largest = max(largest, *(abs(one["loss"] - expected[one["step"]]) for one in log if "loss" in one))
            lines += [row(number, log, place) for place, line in enumerate(log) if "ranks" in line]
            record.append([line for line in log if "ranks" in line])
    state = ladder.rungs[0].layout
    assert state is not None
    head = [
        f"State of {state.num_bytes / 1e6:.1f} MB; four ranks send {max(mirrored_bytes(state, 1)) / 1e6:.1f} MB each a "
        f"step to mirror it. Largest difference of a loss from one device's, {rounds} × {STEPS} steps: {largest:.1e}.",
        "", "| round | ranks | steps done | goes on after | from | moved MB | load s | pause s | predicted s | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    found = {"rounds": record, "largest_difference": largest}
    write_record(FILE, facts("benchmarks.elastic.run"), found, "\n".join([*head, *lines]))


def row(number: int, log: list[dict[str, Any]], place: int) -> str:
    """Of the table."""
    line = log[place]
    done = max((one["step"] for one in log[:place] if "loss" in one), default=-1)
    pause, predicted = line.get("pause_s", float("nan")), line.get("predicted_pause_s", float("nan"))
    return (
        f"| {number} | {line['ranks']} | {done + 1} | {line['goes_on_after']} | {line['from']} | "
        f"{line['moved_bytes'] / 1e6:.2f} | {line['load_s']:.2f} | {pause:.1f} | {predicted:.1f} | "
        f"{predicted / pause:.2f} |"
    )


if __name__ == "__main__":
    main()
