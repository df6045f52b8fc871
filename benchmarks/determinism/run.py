"""Whether the same request gives the same plan file, byte for byte, however busy the machine is.

    python -m benchmarks.determinism.run [--request NAME] [--search fast] [--resume]

Ten requests, from 8 to 405 billion parameters and smaller ones on shared cores, of equal and unequal devices. Each is
planned in processes of their own: with nothing else running, beside two processes that never rest, and under
`nice -n 19`, each with another PYTHONHASHSEED. Plan files are told apart by their SHA-256. Written to results.json and
results.md beside this file, each condition as soon as it is there; rows of other requests are kept. With --resume, what
was planned by the same sources (git's hashes of their folders) is not planned again: the same command
goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from autopar.ir.plan import Plan
from autopar.pipeline import planned_jointly
from autopar.request import BUDGETS, Request
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.plan_time.run import _staged_model
from benchmarks.quality import heterogeneous
from benchmarks.quality.run import PAIRS
from models import gpt

FILE = Path(__file__).with_name("results.json")
Asked = tuple[torch.nn.Module, Any, autopar.Mesh, str]
CONDITIONS = {"idle": "1", "beside two busy processes": "2", "under nice -n 19": "3"}
"""And the seed of the order in which Python goes through sets."""


def _llama(layers: int, hidden: int, inner: int, heads: int, batch: int, mesh: autopar.Mesh) -> Callable[[], Asked]:
    """Llama-3 as transformers has it, in bf16 on the meta device, on sequences of 8,192 tokens."""

    def asked() -> Asked:
        config = transformers.LlamaConfig(
            vocab_size=128_256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
            use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty((batch, 8192), dtype=torch.long, device="meta")
        return model, {"input_ids": tokens, "labels": tokens}, mesh, "adamw"

    return asked


def _staged(row: str) -> Callable[[], Asked]:
    return lambda: (*_staged_model(row), "adamw")


def _pair(name: str) -> Callable[[], Asked]:
    build, mesh = PAIRS[name]
    return lambda: (*build(), mesh, "adamw")


def _gpt_175b() -> Asked:
    sizes = {"num_layers": 96, "hidden_size": 12_288, "num_heads": 96, "seq_len": 2048, "batch_size": 1536}
    config = gpt.Config(vocab_size=51_200, **sizes)
    model, inputs = heterogeneous.half(config)
    return model, inputs, autopar.Mesh("a100", nodes=64, devices_per_node=8), "adamw"


def _unequal() -> Asked:
    mesh = autopar.Mesh([(kind, 1, 8) for kind in heterogeneous.KINDS])
    return *heterogeneous.half(heterogeneous.MODELS["GPT-1.3B"]), mesh, "adamw_master"


def _h100(nodes: int) -> autopar.Mesh:
    return autopar.Mesh("h100", nodes=nodes, devices_per_node=8)


REQUESTS: Mapping[str, Callable[[], Asked]] = {
    "Llama-3-8B, 1x8 h100": _llama(32, 4096, 14_336, 32, 64, _h100(1)),
    "Llama-3-8B, 8x8 h100": _llama(32, 4096, 14_336, 32, 256, _h100(8)),
    "Llama-3-70B, 8x8 h100": _llama(80, 8192, 28_672, 64, 256, _h100(8)),
    "Llama-3-405B, 2048x8 h100": _staged("llama 405B"),
    "GPT-39B, 8x8 v100": _staged("gpt 39B"),
    "GPT-175B, 64x8 a100": _gpt_175b,
    "gpt, 4 cpu": _pair("gpt, 4 cpu"),
    "moe, 4 cpu": _pair("moe, 4 cpu"),
    "unet, 4 cpu": _pair("unet, 4 cpu"),
    "GPT-1.3B, a100 + v100": _unequal,
}


def plan_of(name: str, search: str) -> Plan:
    """What is found in this process."""
    model, inputs, mesh, optimizer = REQUESTS[name]()
    return planned_jointly(trace(model, inputs), Request(mesh, "train", optimizer, None, (), BUDGETS[search]))[1]


@contextmanager
def _busy(processes: int) -> Iterator[None]:
    """So many processes that never rest run meanwhile."""
    with ExitStack() as stack:
        for _ in range(processes):
            beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(beside.wait)
            stack.callback(beside.kill)
        yield


def _planned_apart(name: str, search: str, condition: str) -> dict[str, Any]:
    """What a process of its own finds: the plan file's digest, and what is read from it."""
    command = [sys.executable, "-m", "benchmarks.determinism.run", "--plan", name, "--search", search]
    command = ["nice", "-n", "19", *command] if "nice" in condition else command
    started = time.monotonic()
    with _busy(2 if "busy" in condition else 0):
        hashed = {**os.environ, "PYTHONHASHSEED": CONDITIONS[condition]}
        text = subprocess.run(command, env=hashed, check=True, capture_output=True, text=True).stdout
    plan = Plan.from_json(text)
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16], "wall_s": round(time.monotonic() - started, 1),
        "step_time_ns": plan.predicted.step_time_ns, "stop_reason": plan.search.stop_reason,
        "work_s": plan.search.seconds,
    }  # fmt: skip


def rows_of(name: str, search: str, known: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """One request, condition by condition. known: a row of it whose conditions are taken over, if it is of the same
    sources and search."""
    sources, found = _sources(), dict[str, Any]()
    if known is not None and (known.get("sources"), known["search"]) == (sources, search):
        found = dict(known["found"])
    for condition in CONDITIONS:
        if condition not in found:
            found[condition] = _planned_apart(name, search, condition)
            digests = {one["digest"] for one in found.values()}
            yield {
                "request": name, "search": search, "sources": sources, "is_equal": len(digests) == 1, "found": found,
            }  # fmt: skip


def _sources() -> str:
    """What plans follow from, as committed; with a plus where it isn't."""
    paths = ["autopar", "models", "cost_profiles"]
    asked = ["git", "rev-parse", *(f"HEAD:{path}" for path in paths)]
    hashes = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    changed = subprocess.run(["git", "status", "--porcelain", *paths], check=True, capture_output=True).stdout
    return " ".join(one[:8] for one in hashes) + (" +" if changed else "")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, for people."""
    lines = [
        "| request | search | plan files | step | wall clock, " + " / ".join(CONDITIONS) + " |",
        "|---|---|---|---|---|",
    ]
    for one in rows:
        digests = dict.fromkeys(found["digest"] for found in one["found"].values())
        steps = dict.fromkeys(f"{found['step_time_ns'] / 1e6:,.1f} ms" for found in one["found"].values())
        walls = " / ".join(f"{found['wall_s']:.0f} s" for found in one["found"].values())
        told = f"equal, {', '.join(digests)}" if one["is_equal"] else f"**differ**: {', '.join(digests)}"
        missing = len(CONDITIONS) - len(one["found"])
        told += f" ({missing} conditions to come)" if missing else ""
        lines.append(f"| {one['request']} | {one['search']} | {told} | {', '.join(steps)} | {walls} |")
    return "\n".join(lines)


def main() -> None:
    """Plans what is asked for; fails where plan files differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", action="append", choices=REQUESTS)
    parser.add_argument("--search", choices=BUDGETS, default="default")
    parser.add_argument("--resume", action="store_true", help="plan only what these sources have not planned yet")
    parser.add_argument("--plan", choices=REQUESTS, help="print the plan that this process finds, and no more")
    options = parser.parse_args()
    if options.plan:
        sys.stdout.write(plan_of(options.plan, options.search).to_json())
        return
    known = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else []
    rows = {one["request"]: one for one in known}
    for name in options.request or REQUESTS:
        for one in rows_of(name, options.search, rows.get(name) if options.resume else None):
            rows[name] = one
            write_record(FILE, facts("benchmarks.determinism.run"), {"rows": [*rows.values()]}, table([*rows.values()]))
        print(json.dumps(rows[name]), flush=True)
    sys.exit(0 if all(one["is_equal"] for one in rows.values()) else 1)


if __name__ == "__main__":
    main()
