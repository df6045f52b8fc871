"""Parameters, gradients and optimizer state on the host: predicted step and memory beside what CPU ranks take.

    python -m benchmarks.offload.run [--cases "4x on 2" …] [--rounds 5] [--link 1e9] [--real-time]

Run from the root of the repository. Each case plans a model twice, with everything on the device and with offload, and
trains both from the same weights with AdamW: losses, norms and weights after three steps must be equal bit for bit on
two ranks. On more, gloo adds what is packed together in an order that hangs on where it lies in the buffer, and what
goes to the host is packed by layers: there losses and norms must agree to a millionth, weights to 1e-3 of a step's
size, the learning rate times the steps, and the largest difference is printed. "4x" cases give the search a memory
limit of which the state of training (16 bytes a parameter in float32) is four times what all ranks together have:
nothing fits without offload. The link between device and host is simulated: the runtime delays copies to --link bytes a
second each way, which the plan states.

A step (forward, backward, clipping left out, update) is timed from a barrier to the slowest rank's end; the median over
the steps of a round, and the least of these over rounds, since other programs of a shared host only add. --real-time
puts the ranks in the real-time class, where the system allows it, so that these do not have their cores; where ranks
are more than cores, that is not what the host's profile was measured in: ranks of that class hand a core to each other
sooner, and four on two cores meet in a collective in a fifth of the time. Memory is the allocator's record
(`benchmarks.accuracy.lifetimes`) without what is mapped on the host. Writes results.md; ends with status 1 where a rank
takes a byte more than predicted, a result differs, or a step is more than 15% off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.cost.profile import profile_to_json
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.pipeline import played
from autopar.profiler import load_profile
from autopar.program import load_source, model_state
from benchmarks.accuracy.memory import own_shard
from benchmarks.facts import facts
from models import gpt, llama
from tests.equivalence.offloaded import Trained, train
from tests.rank_pool import pool

HERE = Path(__file__).parent
WITHIN = 0.15
RATE, STEPS = 1e-2, 3  # of what is trained and compared
STATE_BYTES = 16  # a parameter in float32, its gradient and Adam's two moments


class Case(NamedTuple):
    """A model on so many ranks: of a template, or searched under a limit of which the state is `times` what all ranks
    have."""

    model: str
    ranks: int
    template: dict[str, Any] | None
    times: float = 0.0


CASES = {
    "4x on 2": Case("gpt", 2, None, 4.0),
    "4x on 4": Case("llama", 4, None, 4.0),
    "dp 2": Case("gpt", 2, {"dp": 2}),
    "zero 1 on 2": Case("gpt", 2, {"dp": 2, "zero": 1}),
    "zero 3 on 2": Case("gpt", 2, {"dp": 2, "zero": 3}),
    "tp 2": Case("llama", 2, {"tp": 2}),
    "pp 2": Case("llama", 2, {"pp": 2, "microbatches": 2}),
}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with random weights, the same for the same name, and its batch."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_layers": 12, "hidden_size": 256, "num_heads": 4, "vocab_size": 256, "seq_len": 64, "batch_size": 8,
    }  # fmt: skip
    config: Any = (
        gpt.Config(**sizes) if name == "gpt" else llama.Config(**sizes, num_kv_heads=2, mlp_size=704)
    )  # fmt: skip
    module: Any = gpt if name == "gpt" else llama
    return module.build(config), module.example_inputs(config)


def profile_of(link: float) -> str:
    """The host's own profile with a link of that rate, in a file."""
    profile = load_profile("cpu")
    assert profile.beside is not None
    stated = replace(profile.beside, down_bandwidth=link, up_bandwidth=link, capacity_bytes=8 << 30)
    path = Path(tempfile.gettempdir()) / f"autopar-offload-{os.getpid()}-{link:g}.json"
    path.write_text(json.dumps(profile_to_json(replace(profile, host_memory=stated, _shared={}))))
    return str(path)


def time_steps(
    rank: int, world: int, source: str, state: dict[str, Tensor], batch: dict[str, Tensor], steps: int,
    is_real_time: bool,
) -> list[float]:  # fmt: skip
    """Seconds of each step but the first two."""
    from autopar import runtime as rt

    threads = [int(name) for name in os.listdir("/proc/self/task")] if is_real_time else []  # gloo's, too
    with suppress(PermissionError):
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    try:
        return _times(rt, source, state, batch, steps)
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _times(rt: Any, source: str, state: dict[str, Tensor], batch: dict[str, Tensor], steps: int) -> list[float]:
    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    shard: Any = batch if built.num_stages > 1 else own_shard(built, batch)
    rt.keep_freed_memory()
    found = []
    for _ in range(steps + 2):
        optimizer.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        if isinstance(shard, dict):
            built.train_step(**shard)
        else:
            built.train_step(*shard, local=True)
        optimizer.step()
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return found[2:]


class Measured(NamedTuple):
    """A plan as it ran."""

    plan: Plan
    trained: list[Trained]
    step_s: float

    @property
    def peak_bytes(self) -> int:
        """Of the rank that has most."""
        return max(one.peak_bytes for one in self.trained)

    @property
    def error(self) -> float:
        """Of the predicted step."""
        return self.plan.predicted.step_time_ns / 1e9 / self.step_s - 1


def measure(case: Case, plan: Plan, mesh: autopar.Mesh, rounds: int, is_real_time: bool) -> Measured:
    """Trains a few steps of a plan, and times others."""
    model, batch = made(case.model)
    source = autopar.parallelize(model, mesh, batch, plan=plan, check=False).source
    state, ranks = model_state(model), pool(case.ranks)
    trained = ranks.run(train, source, state, batch, STEPS)
    times = [ranks.run(time_steps, source, state, batch, 5, is_real_time) for _ in range(rounds)]
    return Measured(
        plan, trained, min(statistics.median(max(step) for step in zip(*one, strict=True)) for one in times)
    )


def plans(case: Case, mesh: autopar.Mesh) -> tuple[Plan, Plan]:
    """With everything on the device, and with offload: of a search, the same placements."""
    model, batch = made(case.model)
    if case.template is not None:
        options: dict[str, Any] = {**case.template, "check": False}
        return (
            autopar.template_plan(model, mesh, batch, **options),
            autopar.template_plan(model, mesh, batch, offload="optimizer", **options),
        )
    count = sum(p.numel() for p in model.parameters())
    limit = int(STATE_BYTES * count / case.times / case.ranks)
    budget = autopar.SearchBudget(5.0, proposals=0, substitutions=False)
    asked: dict[str, Any] = {"search": budget, "check": False}
    try:
        autopar.parallelize(model, mesh, batch, memory_limit=limit, **asked)
        raise SystemExit(f"expected nothing to fit in {limit:,} bytes without offload")
    except InfeasibleError as error:
        print(f"  without offload: {str(error)[:160]} …", flush=True)
    found = autopar.parallelize(model, mesh, batch, memory_limit=limit, allow=("offload",), **asked).plan
    return played(on_device(found), model, batch)[0], found


def on_device(plan: Plan) -> Plan:
    """The same placements, with everything on the device."""
    stages = [
        replace(stage, storage={name: replace(kept, on_host=False) for name, kept in stage.storage.items()})
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


class Difference(NamedTuple):
    """Between two trainings: of losses and norms, of the larger; of any weight, of what the steps may move it."""

    told: float
    weight: float

    @property
    def is_rounding(self) -> bool:
        """Whether another order of sums explains it."""
        return self.told <= 1e-6 and self.weight <= 1e-3


def difference(one: list[Trained], other: list[Trained]) -> Difference:
    """The largest over ranks; (0, 0) where all is equal bit for bit."""
    pairs = list(zip(one, other, strict=True))
    told = (
        abs(x - y) / max(abs(x), abs(y))
        for a, b in pairs for x, y in zip(a.losses + a.norms, b.losses + b.norms, strict=True) if x != y
    )  # fmt: skip
    weights = (float((x - b.weights[n]).abs().max()) for a, b in pairs for n, x in a.weights.items())
    return Difference(max(told, default=0.0), max(weights) / (RATE * STEPS))


def main() -> int:
    """Runs the cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=float, default=1e9, help="bytes a second, each way")
    parser.add_argument("--real-time", action="store_true", help="ranks in the real-time class")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows, failed = [], False
    for name in options.cases:
        case = CASES[name]
        mesh = autopar.Mesh(profile_of(options.link), devices_per_node=case.ranks)
        print(name, flush=True)
        free, found = (measure(case, plan, mesh, options.rounds, options.real_time) for plan in plans(case, mesh))
        told, apart = found.plan.predicted, difference(free.trained, found.trained)
        same = apart == (0.0, 0.0) or (case.ranks > 2 and apart.is_rounding)
        fits = found.peak_bytes <= told.peak_bytes
        size = f"{apart.told:.0e}, weights {apart.weight:.0e}"
        equal = "bit for bit" if apart == (0.0, 0.0) else f"to {size}" if same else f"NO: {size}"
        failed |= not same or not fits or abs(found.error) > WITHIN
        rows.append(
            f"| {name} | {free.peak_bytes / 1e6:.2f} | {found.peak_bytes / 1e6:.2f} | {told.peak_bytes / 1e6:.2f} | "
            f"{(told.host_bytes or 0) / 1e6:.1f} | {free.step_s * 1e3:.0f} ({free.error:+.0%}) | "
            f"{found.step_s * 1e3:.0f} | {told.step_time_ns / 1e6:.0f} | {found.error:+.1%} | {equal} |"
        )
        print(rows[-1], flush=True)
    heads = (
        "case", "device MB without", "with", "predicted", "host MB", "step ms without (error)", "with", "predicted",
        "error", "equal",
    )  # fmt: skip
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]
    told_facts = [f"{key}: {value}  " for key, value in facts("benchmarks.offload.run").items()]
    (HERE / "results.md").write_text("\n".join(["# Offload on CPU ranks", "", *told_facts, "", *table, ""]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
