"""How gradients meet: as factors or as sums, by levels or along one axis after another; predicted, and on CPU ranks.

    python -m benchmarks.gradients.run [factors] [levels] [servers] [--rounds 12] [--megabytes-a-second 40]

factors: a perceptron with wide layers at batch 8, in data parallelism of two and four gloo ranks. Gradients of weights
are summed (`gradients="sums"`), or rows are gathered (`gradients="factors"`); and what the search takes where samples
are split and every rank has a copy of the model.

levels: a model of half those widths at batch 64 on four ranks of this host, taken as two nodes of two. What crosses
from node to node is delayed: the two pairs of ranks share a link of so many megabytes a second in each direction, which
a collective occupies for the bytes that its ring sends over it. Along one axis of four ranks; along two, one after the
other; and by levels: reduce-scatter inside, all-reduce across, all-gather inside.

servers: the same model on four ranks, taken as a node each, beside two and four ranks without a device that sum
gradients; each of them has a link of so many megabytes a second (`served`). Instead of an all-reduce.

Programs of a case take turns in the same processes, round by round; ratios are medians over rounds, with quartiles.
Written to factors.md, levels.md and servers.md, and .json beside them, with command, machine and date.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cost.profile import profile_to_json
from autopar.ir.placement import I, R
from autopar.ir.plan import Plan
from autopar.ir.redistribution import Step
from autopar.profiler import load_profile
from autopar.runtime import comm
from autopar.simulate import predict
from benchmarks.facts import facts, write_record
from benchmarks.gradients.served import served_side_by_side
from benchmarks.side_by_side import Times, ratios, side_by_side
from models import mlp

HERE = Path(__file__).parent
WIDTHS = (2048, 4096, 4096, 1024)
CONFIG = mlp.Config(widths=WIDTHS, batch_size=8)
NARROWER = mlp.Config(widths=tuple(width // 2 for width in WIDTHS), batch_size=64)
COPIES = (
    autopar.Constraint(stages=1),
    autopar.Constraint("*", ("S(0)",), what="input"),
    autopar.Constraint("layers.*", ("S(0)",), what="output"),
    autopar.Constraint("*", ("R", "I"), what="used"),
    autopar.Constraint("*", ("I",), what="stored"),
)
"""Data parallelism of copies, however gradients meet."""
MANY = 4096
ACROSS, RANKS = "dp", 4


def build(config: mlp.Config) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model and its batch."""
    torch.manual_seed(0)
    return mlp.build(config), mlp.example_inputs(config)


def source_of(plan: Plan, config: mlp.Config) -> str:
    """The plan's program."""
    model, batch = build(config)
    return autopar.parallelize(model, plan.mesh, batch, plan=plan, check=False).source


# Factors ----------------------------------------


def factors(ranks: int, rounds: int) -> dict[str, Any]:
    """Of sums and factors, and whether the search takes them."""
    model, batch = build(CONFIG)
    mesh = autopar.Mesh("cpu", devices_per_node=ranks)
    plans = {
        how: autopar.template_plan(model, mesh, batch, dp=ranks, gradients=how, check=False)
        for how in ("sums", "factors")
    }
    found = autopar.parallelize(model, mesh, batch, constraints=COPIES, search="fast", check=False).plan
    free = autopar.parallelize(model, mesh, batch, search="fast", check=False).plan
    times = side_by_side(partial(build, CONFIG), {k: source_of(p, CONFIG) for k, p in plans.items()}, ranks, rounds)
    return {
        **_row(f"factors, {ranks} ranks", plans, times, "sums", "factors"),
        "search": "factors" if "as factors" in str(found) else "sums",
        "search_ms": found.predicted.step_time_ns / 1e6,
        "unconstrained_ms": free.predicted.step_time_ns / 1e6,
        "unconstrained": "factors" if "as factors" in str(free) else "other placements",
    }


def _row(case: str, plans: Mapping[str, Plan], times: Mapping[str, Times], one: str, other: str) -> dict[str, Any]:
    longer = ratios(times[one], times[other])
    return {
        "case": case, "slower": one, "faster": other,
        "predicted_ms": {name: plan.predicted.step_time_ns / 1e6 for name, plan in plans.items()},
        "measured_ms": {name: found.median() for name, found in times.items()},
        "predicted_ratio": plans[one].predicted.step_time_ns / plans[other].predicted.step_time_ns,
        "measured_ratio": statistics.median(longer), "quartiles": statistics.quantiles(longer, n=4),
        "sent_bytes": {name: dict(plan.predicted.comm_bytes) for name, plan in plans.items()},
        "loss_difference": max(abs(a - b) for a, b in zip(times[one].losses, times[other].losses, strict=True)),
    }  # fmt: skip


# Levels ----------------------------------------


def slow_mesh(bytes_a_second: float) -> autopar.Mesh:
    """Two nodes of two of this host's devices, whose link is so slow in each direction."""
    profile = profile_to_json(load_profile("cpu"))
    inside = next(link for link in profile["links"] if link["level"] == "intra_node")
    across = {**inside, "level": "inter_node", "bandwidth": bytes_a_second, "node_bandwidth": bytes_a_second}
    profile["links"] = [inside, across]
    path = Path(tempfile.mkdtemp(prefix="autopar-gradients-")) / "slow.json"
    path.write_text(json.dumps(profile))
    return autopar.Mesh(str(path), nodes=2, devices_per_node=2)


def build_slow(config: mlp.Config, bytes_a_second: float) -> tuple[nn.Module, Mapping[str, Any]]:
    """On a rank: the model and its batch; from here on, all-reduces along axis dp come no earlier than the link, which
    all ranks of a node share, lets them through: of each of their rings 2(n−1)/n of the bytes in each direction."""
    free, start, at_once = [0.0], comm.start_all_reduce, comm.all_reduce

    def ready(buffer: torch.Tensor, axis: comm.Axis) -> float:
        rings = RANKS // axis.size
        seconds = rings * 2 * (axis.size - 1) / axis.size * buffer.nbytes / bytes_a_second
        free[0] = max(free[0], time.perf_counter()) + (seconds if axis.name == ACROSS else 0.0)
        return free[0]

    def start_delayed(buffer: torch.Tensor, axis: comm.Axis) -> comm.Wait:
        at, wait = ready(buffer, axis), start(buffer, axis)

        def waited() -> None:
            wait()
            _sleep_until(at)

        return waited if axis.name == ACROSS else wait

    def all_reduce(buffer: torch.Tensor, axis: comm.Axis, *others: Any) -> None:
        at = ready(buffer, axis) if axis.name == ACROSS and axis.size > 1 else 0.0
        at_once(buffer, axis, *others)
        _sleep_until(at)

    comm.start_all_reduce, comm.all_reduce = start_delayed, all_reduce  # type: ignore[assignment]
    return build(config)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.perf_counter()))


def levels(bytes_a_second: float, rounds: int) -> list[dict[str, Any]]:
    """Of one axis, two axes in turn, and levels."""
    model, batch = build(NARROWER)
    mesh = slow_mesh(bytes_a_second)
    chosen = autopar.template_plan(model, mesh, batch, dp=RANKS, hsdp=2, check=False)
    plans = {
        "one axis": autopar.template_plan(model, mesh, batch, dp=RANKS, check=False),
        "two axes": _predicted(in_turn(chosen)),
        "levels": chosen,
    }
    sources = {name: source_of(plan, NARROWER) for name, plan in plans.items()}
    times = side_by_side(partial(build_slow, NARROWER, bytes_a_second), sources, RANKS, rounds)
    found = [_searched(mesh, rows) for rows in (NARROWER.batch_size, MANY)]
    return [
        {
            **_row(f"levels instead of {name}", plans, times, name, "levels"),
            "template": _meeting(chosen),
            "search": told,
        }
        for name, told in zip(("one axis", "two axes"), found, strict=True)
    ]


def _searched(mesh: autopar.Mesh, rows: int) -> str:
    """How gradients meet in the plan that the search finds for copies of the model."""
    config = replace(NARROWER, batch_size=rows)
    with torch.device("meta"):
        model, _ = build(config)
    plan = autopar.parallelize(
        model, mesh, mlp.example_inputs(config), constraints=COPIES, search="fast", check=False
    ).plan
    return f"at batch {rows:,}: {_meeting(plan)}"


def _meeting(plan: Plan) -> str:
    """How gradients meet: as the plan's screen says it."""
    return next(
        (line.split(maxsplit=1)[1] for line in str(plan).splitlines() if line.startswith("  gradients")), "sums"
    )


def in_turn(plan: Plan) -> Plan:
    """The plan with gradients of parameters summed along one axis after the other."""
    steps = tuple(Step(place, I, R) for place in range(len(plan.stage.axes)))
    made = (replace(r, steps=steps) if r.tensor in plan.parameters else r for r in plan.stage.redistributes)
    return plan.placed(redistributes=tuple(made))


def _predicted(plan: Plan) -> Plan:
    """With the step that the simulator foretells."""
    timeline: Any = plan.timeline()
    return replace(plan, predicted=predict(timeline))


# Servers ----------------------------------------


def servers(count: int, bytes_a_second: float, rounds: int) -> dict[str, Any]:
    """Of an all-reduce, and so many servers."""
    model, batch = build(NARROWER)
    path = slow_mesh(bytes_a_second).profile
    mesh, served = (autopar.Mesh(path, nodes=RANKS, servers=number) for number in (None, count))
    plans = {
        "servers": autopar.template_plan(model, served, batch, dp=RANKS, check=False),
        "all-reduce": autopar.template_plan(model, mesh, batch, dp=RANKS, check=False),
    }
    sources = {name: source_of(plan, NARROWER) for name, plan in plans.items()}
    times = served_side_by_side(partial(build, NARROWER), sources, RANKS, count, rounds, bytes_a_second)
    return {
        **_row(f"{count} servers beside {RANKS} ranks", plans, times, "all-reduce", "servers"),
        "template": _meeting(plans["servers"]),
        "search": _searched(served, MANY),
    }


# The page ----------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [
        "Training steps with AdamW; how many times longer the slower way takes.", "",
        "| case | slower → faster, predicted ms | ratio | measured ms, median | ratio, quartiles | the search takes |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        low, _, high = row["quartiles"]
        names = row["slower"], row["faster"]
        predicted, measured = (
            " → ".join(f"{row[key][name]:.1f}" for name in names) for key in ("predicted_ms", "measured_ms")
        )
        lines.append(
            f"| {row['case']} | {names[0]} → {names[1]}: {predicted} | {row['predicted_ratio']:.2f} | {measured} | "
            f"{row['measured_ratio']:.2f} ({low:.2f} … {high:.2f}) | {row['search']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="factors, levels, servers", default=["factors", "levels", "servers"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--megabytes-a-second", type=float, default=40.0)
    options = parser.parse_args()
    for case in options.cases:
        if case == "factors":
            rows = [factors(ranks, options.rounds) for ranks in (2, 4)]
        elif case == "servers":
            rows = [servers(count, options.megabytes_a_second * 1e6, options.rounds) for count in (2, 4)]
        else:
            rows = levels(options.megabytes_a_second * 1e6, options.rounds)
        print(json.dumps(rows, indent=1), flush=True)
        told = facts("benchmarks.gradients.run")
        write_record(HERE / case, told, {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
