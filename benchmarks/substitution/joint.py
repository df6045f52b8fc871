"""Substitutions chosen together with the sharding, against the best graph of one device sharded afterwards.

    python -m benchmarks.substitution.joint [--cases lora@h100:8 …] [--seconds 20]

Each case is a model on a mesh. "as it is": the plan of the model's own graph; "then": that of the graph which is best
on one device; both planned in all settings. "jointly": what `autopar.parallelize` takes by default, of all graphs that
it planned near the first of these. Step times are simulated, before refinement, which comes after each of them. Seconds
are those of planning the model's own graph, and those that finding and planning the others took after that. Printed and
written to joint.json and joint.md with command, machine and date.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import GraphPlan
from autopar.pipeline import placed, planned_jointly
from autopar.request import Request
from autopar.rewrites import rewrites
from autopar.show.text import rules_text
from autopar.substitute import load_rules
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.substitution.graphs import build
from models import gpt, llama, llama_lora, lstm

HERE = Path(__file__).parent


def _gpt2(
    layers: int, hidden: int, heads: int, batch: int, length: int, vocab: int = 50304
) -> tuple[nn.Module, dict[str, Any]]:  # fmt: skip
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        use_cache=False, vocab_size=vocab, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    tokens = torch.zeros((batch, length), dtype=torch.long)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def _of(module: Any, config: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (module.build(config), module.example_inputs(config))


_LORA = llama_lora.Config(512, 128, 2, 512, 8, 4, 1408, batch_size=8, rank=8, alpha=16.0)
_ON_WEIGHTS = llama_lora.Config(
    512, 64, 4, 256, 8, 4, 704, batch_size=16, rank=32, alpha=16.0, adapts="weight"
)  # fmt: skip
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lora": _of(llama_lora, _LORA),
    "lora-weight": _of(llama_lora, _ON_WEIGHTS),
    "lora-7b-block": _of(llama_lora, llama_lora.Config(32000, 2048, 2, 4096, 32, 32, 11008, batch_size=16, rank=16)),
    "gpt2": lambda: _gpt2(4, 1024, 16, 16, 512),
    "gpt2-one-sample": lambda: _gpt2(4, 512, 8, 1, 256, vocab=2048),
    "gpt2-wide": lambda: _gpt2(2, 4096, 32, 8, 1024),
    "gpt": _of(gpt, gpt.Config(50304, 512, 4, 1024, 16, batch_size=16)),
    "llama": _of(llama, llama.Config(32000, 512, 4, 1024, 16, 4, 2816, batch_size=16)),
    "gpt-2-layers": _of(gpt, gpt.Config(32000, 512, 2, 1024, 16, batch_size=16)),
    "gpt-32-layers": _of(gpt, gpt.Config(32000, 512, 32, 1024, 16, batch_size=16)),
    "bert": lambda: build("bert", "train"),
    "lstm": _of(lstm, lstm.Config()),
    "llama-1": _of(llama, llama.Config(2048, 16, 2, 1024, 8, 8, 2816, batch_size=4)),
    "nas_rnn": lambda: build("nas_rnn", "train"),
}
CONSTRAINTS = {"gpt2-one-sample": (autopar.Constraint(stages=1),)}
"""A single sample in a single stage leaves tensor parallelism, for which GPT-2's fused projections are in the way."""
CASES = (
    "llama@h100:8",
    "gpt@h100:8",
    "lora@h100:8",
    "gpt2@h100:8",
    "bert@h100:4",
    "lstm@h100:4",
    "nas_rnn@h100:4",
    "lora@cpu:4",
    "lora-weight@cpu:4",
    "gpt2-one-sample@cpu:4",
    "gpt-2-layers@a100:8",
    "gpt-32-layers@a100:8",
)


@dataclass(frozen=True)
class Row:
    """Simulated milliseconds of a step, and seconds that planning took. graphs: those that were planned jointly."""

    case: str
    graphs: tuple[GraphPlan, ...]
    given_ms: float
    then_ms: float
    jointly_ms: float
    given_s: float
    others_s: float

    @property
    def gain(self) -> float:
        """How many times faster the joint choice is than sharding what is best on one device."""
        return self.then_ms / self.jointly_ms


def _asked(case: str, seconds: float) -> tuple[Graph, Request]:
    name, _, where = case.partition("@")
    profile, _, devices = where.partition(":")
    with torch.device("meta"):
        model, batch = MODELS[name]()
    budget = autopar.SearchBudget(seconds, proposals=0)
    mesh = autopar.Mesh(profile, devices_per_node=int(devices))
    return trace(model, batch), Request(mesh, "train", "adamw", None, CONSTRAINTS.get(name, ()), budget)


def _then(graph: Graph, request: Request) -> autopar.Plan | None:
    """The plan of the graph that is best on one device; None if that is the model's own."""
    found = rewrites(graph, replace(request, mesh=autopar.Mesh(request.mesh.profile, devices_per_node=1)))
    best = min(found.candidates, key=lambda candidate: candidate.cost_ns, default=None)
    if best is None or best.cost_ns >= found.before_ns:
        return None
    return replace(placed(best.graph, request), substitutions=best.steps)


def chosen_plans(case: str, seconds: float) -> dict[str, autopar.Plan]:
    """The plans of the graph as it is, of the best graph of one device, and of the joint choice."""
    graph, request = _asked(case, seconds)
    given = placed(graph, request)
    return {"as it is": given, "then": _then(graph, request) or given, "jointly": planned_jointly(graph, request)[1]}


def row(case: str, seconds: float) -> Row:
    graph, request = _asked(case, seconds)
    load_rules()
    began = time.perf_counter()
    jointly = planned_jointly(graph, request)[1]
    took, searched = time.perf_counter() - began, jointly.search.rewriting
    assert searched is not None
    given_ms = (searched.graphs[0].step_time_ns or 0) / 1e6
    then = _then(graph, request)
    then_ms = given_ms if then is None else then.predicted.step_time_ns / 1e6
    jointly_ms = jointly.predicted.step_time_ns / 1e6
    return Row(case, searched.graphs, given_ms, then_ms, jointly_ms, took - searched.seconds, searched.seconds)


def _graph_text(graph: GraphPlan) -> str:
    step = "nothing fits" if graph.step_time_ns is None else f"{graph.step_time_ns / 1e6:.3f} ({graph.outcome})"
    return f"{rules_text(graph.rules)} on {graph.stages} × {graph.mesh}: {graph.one_device_ns / 1e6:.3f} → {step}"


def table(rows: list[Row]) -> str:
    lines = [
        "| model and mesh | graphs: ms on one device → ms sharded | as it is | then | jointly | gain | planning, s |",
        "|---" * 7 + "|",
    ]
    for each in rows:
        lines.append(
            f"| {each.case} | {'; '.join(map(_graph_text, each.graphs))} | {each.given_ms:.3f} | {each.then_ms:.3f} "
            f"| {each.jointly_ms:.3f} | {each.gain:.3f} | {each.given_s:.1f} + {each.others_s:.1f} |"
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
    told, found = facts("benchmarks.substitution.joint"), {"rows": [asdict(each) for each in rows]}
    write_record(options.output / "joint", told, found, table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
