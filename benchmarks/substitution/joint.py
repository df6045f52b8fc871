"""Substitutions chosen together with the sharding, against the best graph of one device sharded afterwards.

    python -m benchmarks.substitution.joint [--cases lora@h100:8 …] [--seconds 20]

Each case is a model on a mesh. All graphs that substitutions lead to (`autopar.rewrites`) are planned in the same way;
"then" is the plan of the graph that the search chooses for one device, "jointly" the fastest of all. Step times are
simulated. The search leaves away what gains less than a profile can tell on one device (2%); with the batch divided
among eight, the same substitution may gain more, which is what the joint choice sees.
Printed and written to joint.json and joint.md with command, machine and date.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cost import load_profile
from autopar.cost.host import cpu_model
from autopar.pipeline import planned
from autopar.planning import Request
from autopar.rewrites import rewrites
from autopar.substitute import Candidate
from autopar.substitute.lifting import lifted
from autopar.substitute.pricing import Pricer
from autopar.trace import trace
from benchmarks.substitution.graphs import build
from models import gpt, llama, llama_lora

HERE = Path(__file__).parent


def _gpt2(layers: int, hidden: int, heads: int, batch: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        use_cache=False, vocab_size=50304,
    )  # fmt: skip
    tokens = torch.zeros((batch, length), dtype=torch.long)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def _of(module: Any, config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (module.build(config), module.example_inputs(config))


_LORA = llama_lora.Config(512, 128, 2, 512, 8, 4, 1408, batch_size=8, rank=8, alpha=16.0)
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lora": _of(llama_lora, _LORA),
    "lora-7b-block": _of(llama_lora, llama_lora.Config(32000, 2048, 2, 4096, 32, 32, 11008, batch_size=16, rank=16)),
    "gpt2": lambda: _gpt2(4, 1024, 16, 16, 512),
    "gpt2-wide": lambda: _gpt2(2, 4096, 32, 8, 1024),
    "gpt": _of(gpt, gpt.Config(50304, 512, 4, 1024, 16, batch_size=16)),
    "llama": _of(llama, llama.Config(32000, 512, 4, 1024, 16, 4, 2816, batch_size=16)),
    "llama-1": _of(llama, llama.Config(2048, 16, 2, 1024, 8, 8, 2816, batch_size=4)),
    "nas_rnn": lambda: build("nas_rnn", "train"),
}
CASES = (
    "lora@h100:8",
    "lora@cpu:4",
    "gpt2@h100:8",
    "gpt@h100:8",
    "llama@h100:8",
    "nas_rnn@h100:4",
    "lora-7b-block@h100:8",
)


@dataclass(frozen=True)
class Row:
    """Simulated milliseconds of a step: of the graph as it is, of the best of one device, and of the joint choice."""

    case: str
    alone_ms: tuple[float, ...]  # of each graph on one device, the given one first
    rules: tuple[dict[str, int], ...]
    sharded_ms: tuple[float, ...]
    given_ms: float
    then_ms: float
    jointly_ms: float

    @property
    def gain(self) -> float:
        """How many times faster the joint choice is than sharding what is best on one device."""
        return self.then_ms / self.jointly_ms


def _candidates(case: str, seconds: float) -> tuple[Request, list[Candidate], int]:
    """What is asked for, all graphs, the given one first, and which of them is best on one device."""
    name, _, where = case.partition("@")
    profile, _, devices = where.partition(":")
    with torch.device("meta"):
        model, batch = MODELS[name]()
    graph = trace(model, batch)
    mesh = autopar.Mesh(profile, devices_per_node=int(devices))
    request = Request(mesh, "train", "adamw", None, (), autopar.SearchBudget(seconds, substitutions=True))
    price = Pricer(load_profile(profile), trains=True)
    one = replace(request, mesh=autopar.Mesh(profile, devices_per_node=1))
    given = Candidate(graph, (), price(lifted(graph)))
    chosen = min([given, *rewrites(graph, one)], key=lambda candidate: candidate.cost_ns)
    graphs = list({each.graph.fingerprint: each for each in (given, chosen, *rewrites(graph, request))}.values())
    return request, graphs, [candidate.graph.fingerprint for candidate in graphs].index(chosen.graph.fingerprint)


def chosen_plans(case: str, seconds: float) -> dict[str, autopar.Plan]:
    """The plans of the graph as it is, of the best graph of one device, and of the joint choice."""
    request, graphs, best = _candidates(case, seconds)
    plans = [replace(planned(each.graph, request), substitutions=each.steps) for each in graphs]
    jointly = min(plans, key=lambda plan: plan.predicted.step_time_ns)
    return {"as it is": plans[0], "then": plans[best], "jointly": jointly}


def row(case: str, seconds: float) -> Row:
    request, graphs, best = _candidates(case, seconds)
    price = Pricer(load_profile(request.mesh.profile), trains=True)
    alone = [price(lifted(candidate.graph)) for candidate in graphs]
    sharded = [planned(candidate.graph, request).predicted.step_time_ns for candidate in graphs]
    return Row(
        case,
        tuple(round(ns / 1e6, 3) for ns in alone),
        tuple(dict(Counter(step.rule for step in candidate.steps)) for candidate in graphs),
        tuple(round(ns / 1e6, 3) for ns in sharded),
        sharded[0] / 1e6,
        sharded[best] / 1e6,
        min(sharded) / 1e6,
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| model and mesh | graphs: ms on one device → ms sharded | as it is | then | jointly | gain |",
        "|---" * 6 + "|",
    ]
    for each in rows:
        graphs = "; ".join(
            f"{', '.join(f'{rule} ×{count}' for rule, count in rules.items()) or 'as it is'}: {one:.3f} → {many:.3f}"
            for rules, one, many in zip(each.rules, each.alone_ms, each.sharded_ms, strict=True)
        )
        lines.append(
            f"| {each.case} | {graphs} | {each.given_ms:.3f} | {each.then_ms:.3f} | {each.jointly_ms:.3f} "
            f"| {each.gain:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*CASES])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    rows = []
    for case in options.cases:
        rows.append(row(case, options.seconds))
        print(rows[-1], flush=True)
    facts = {
        "command": " ".join(["python -m benchmarks.substitution.joint", *sys.argv[1:]]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "rows": [asdict(each) for each in rows]}, indent=1, ensure_ascii=False)
    (options.output / "joint.json").write_text(text + "\n", encoding="utf-8")
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), "", table(rows), ""]
    (options.output / "joint.md").write_text("\n".join(lines), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
