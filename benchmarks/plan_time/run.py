"""How long planning takes: from `autopar.parallelize` to source, for GPTs of 2 and 32 layers and for Llama-3-70B; and
from trace to plan: GPT-39B on 64 v100, Llama-3-405B on 16,384 h100, 16 and 128 layers on 16 a100, and the transformers
library's GPT-2 of the sizes of the GPTs of 32 layers and of 39 billion parameters.

    python -m benchmarks.plan_time.run [--repeats 3] [--staged] [--output benchmarks/plan_time/results.json]

GPT: d=1024, 16 heads, vocabulary 32,000, batch 16 × 512, 8 devices (every logical shape is searched). Llama: the
transformers model of 80 layers on meta tensors, batch 16 × 4,096, bf16 weights, on h100 8×8. Each row runs in a
process of its own, rows in turn, so that no run finds another's caches; the medians are reported. Rows of stages tell
seconds of the trace (`torch.export`, which goes through every layer) apart from those of the search, and processor
seconds from those of the wall, which grow on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts

ROWS = ("gpt 2 layers", "gpt 32 layers", "llama 70B")
STAGED = (
    "gpt 39B", "llama 405B", "gpt 16 layers staged", "gpt 128 layers staged", "hf gpt2 32 layers", "hf gpt2 39B",
)  # fmt: skip
TARGETS = {"gpt 39B": 24.0, "llama 405B": 60.0, "hf gpt2 32 layers": 8.0, "hf gpt2 39B": 20.0}


def plan_row(row: str) -> dict[str, Any]:
    """Plans one row's model in this process; seconds of the whole, of the solver, and what came out."""
    import autopar

    model, inputs, mesh = llama_70b() if row == "llama 70B" else _gpt(int(row.split()[1]))
    started = time.perf_counter()
    program = autopar.parallelize(model, mesh, inputs)
    seconds = time.perf_counter() - started
    autopar.verify(program.plan, model, inputs)
    plan = program.plan
    assert plan.predicted.peak_bytes <= plan.memory_limit
    return {
        "seconds": seconds,
        "solve_seconds": sum(tried.solve_seconds or 0.0 for tried in plan.search.tried),
        "search_seconds": sum(tried.seconds or 0.0 for tried in plan.search.tried),
        "stop_reason": plan.search.stop_reason,
        "cost_ns": plan.search.cost_ns,
        "lower_bound_ns": plan.search.lower_bound_ns,
        "mesh": "x".join(str(axis.size) for axis in plan.stage.axes),
        "peak_bytes": plan.predicted.peak_bytes,
        "memory_limit": plan.memory_limit,
        "step_time_ns": plan.predicted.step_time_ns,
        "source_lines": len(program.source.splitlines()),
    }


def plan_staged_row(row: str) -> dict[str, Any]:
    """Plans one row's model, without emission."""
    from autopar.pipeline import planned_jointly
    from autopar.request import Request, SearchBudget
    from autopar.trace import trace

    model, inputs, mesh = _staged_model(row)
    started, worked = time.perf_counter(), time.process_time()
    graph = trace(model, inputs)
    traced, trace_work = time.perf_counter(), time.process_time()
    _, plan = planned_jointly(graph, Request(mesh, "train", "adamw", None, (), SearchBudget()))
    ended = time.perf_counter()
    assert plan.predicted.peak_bytes <= plan.memory_limit
    parts = plan.stages
    return {
        "seconds": ended - started,
        "trace_seconds": traced - started,
        "search_seconds": ended - traced,
        "processor_seconds": time.process_time() - worked,
        "search_processor_seconds": time.process_time() - trace_work,
        "stop_reason": plan.search.stop_reason,
        "stages": len(parts),
        "mesh": "x".join(str(axis.size) for axis in parts[0].axes),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recomputed_modules": len(plan.recompute),
        "step_time_ns": plan.predicted.step_time_ns,
        "peak_bytes": plan.predicted.peak_bytes,
        "memory_limit": plan.memory_limit,
    }


def _staged_model(row: str) -> tuple[Any, Any, Any]:
    import torch

    import autopar
    from models import gpt

    if row == "llama 405B":
        return llama_405b()
    if row.startswith("hf gpt2"):
        return hf_gpt2(is_39b=row.endswith("39B"))
    sizes = {"num_layers": 48, "hidden_size": 8192, "num_heads": 64, "seq_len": 1024, "batch_size": 1024}
    mesh = autopar.Mesh("v100", nodes=8, devices_per_node=8)
    if row != "gpt 39B":
        sizes = {"num_layers": int(row.split()[1]), "hidden_size": 2048, "num_heads": 16, "seq_len": 1024}
        sizes["batch_size"] = 256
        mesh = autopar.Mesh("a100", nodes=2, devices_per_node=8)
    config = gpt.Config(vocab_size=51_200, **sizes)
    with torch.device("meta"):
        model = gpt.build(config).to(torch.float16)
    return model, {name: t.to("meta") for name, t in gpt.example_inputs(config).items()}, mesh


def hf_gpt2(is_39b: bool) -> tuple[Any, Any, Any]:
    """The transformers library's: 32 layers in bf16 on 8 a100, or 39 billion parameters in fp16 on 64 v100."""
    import torch
    import transformers

    import autopar

    layers, hidden, heads, vocabulary, length = (48, 8192, 64, 51_200, 1024) if is_39b else (32, 1024, 16, 32_000, 512)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=hidden, n_layer=layers, n_head=heads, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.float16 if is_39b else torch.bfloat16)
    tokens = torch.empty((1024 if is_39b else 16, length), dtype=torch.long, device="meta")
    mesh = autopar.Mesh("v100", nodes=8, devices_per_node=8) if is_39b else autopar.Mesh("a100", devices_per_node=8)
    return model, {"input_ids": tokens, "labels": tokens}, mesh


def llama_405b() -> tuple[Any, Any, Any]:
    import torch
    import transformers

    import autopar

    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.empty((2048, 8192), dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}, autopar.Mesh("h100", nodes=2048, devices_per_node=8)


def _gpt(num_layers: int) -> tuple[Any, Any, Any]:
    import torch

    import autopar
    from models import gpt

    config = gpt.Config(
        num_layers=num_layers, hidden_size=1024, num_heads=16, vocab_size=32_000, batch_size=16, seq_len=512
    )
    with torch.device("meta"):
        model = gpt.build(config)
    inputs = {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()}
    return model, inputs, autopar.Mesh("a100", devices_per_node=8)


def llama_70b() -> tuple[Any, Any, Any]:
    """The model on the meta device, its batch, and 64 h100."""
    import torch
    import transformers

    import autopar

    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.empty((16, 4096), dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}, autopar.Mesh("h100", nodes=8, devices_per_node=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=(*ROWS, *STAGED), help="plan one row here and print it as JSON")
    parser.add_argument("--staged", action="store_true", help="the rows from trace to plan alone, into staged.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps((plan_row if arguments.row in ROWS else plan_staged_row)(arguments.row)))
        return
    if arguments.staged:
        _report_staged(arguments.repeats)
        return
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    for _ in range(arguments.repeats):
        for row in ROWS:
            runs[row].append(_apart(row))
            print(f"{row}: {runs[row][-1]['seconds']:.2f} s, solver {runs[row][-1]['solve_seconds']:.2f} s", flush=True)
    report = _report(runs)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["medians"], indent=1))


def _report_staged(repeats: int) -> None:
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in STAGED}
    for _ in range(repeats):
        for row in STAGED:
            runs[row].append(_apart(row))
            print(
                f"{row}: {runs[row][-1]['seconds']:.1f} s, search {runs[row][-1]['search_seconds']:.1f} s", flush=True
            )
    seconds = {
        row: {key: statistics.median(r[key] for r in found) for key in found[0] if key.endswith("seconds")}
        for row, found in runs.items()
    }
    shallow, deep = seconds["gpt 16 layers staged"], seconds["gpt 128 layers staged"]
    report = {
        **facts("benchmarks.plan_time.run"),
        "medians": seconds,
        "targets_seconds": TARGETS,
        "ratio_128_to_16_layers": {key: deep[key] / shallow[key] for key in ("seconds", "search_processor_seconds")},
        "runs": runs,
    }
    Path(__file__).with_name("staged.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("medians", "ratio_128_to_16_layers")}, indent=1))


def _apart(row: str) -> dict[str, Any]:
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, __file__, "--row", row],
        check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def _report(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    medians = {
        row: {key: statistics.median(r[key] for r in found) for key in ("seconds", "solve_seconds", "search_seconds")}
        for row, found in runs.items()
    }
    return {
        **facts("benchmarks.plan_time.run"),
        "medians": medians,
        "solve_ratio_32_to_2_layers": medians["gpt 32 layers"]["solve_seconds"]
        / medians["gpt 2 layers"]["solve_seconds"],
        "runs": runs,
    }


if __name__ == "__main__":
    main()
