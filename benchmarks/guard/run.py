"""What holding the traced graph against the model takes of `autopar.parallelize`.

    python -m benchmarks.guard.run [REPEATS]

Each model is planned for four h100 with the default search, in a process of its own, models in turn, `REPEATS` times
(3); medians are reported, and the share is of one run: processor seconds of the comparison by those of the whole call.
Memory is what the process's peak grew by in the comparison, with that of tracing before it. Writes results.json and
results.md.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.facts import facts, write_record

HERE = Path(__file__).parent


def hf_gpt2(length: int, device: str = "cpu") -> tuple[Any, Any]:
    """As transformers has it by default: 12 layers, 124 million parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config())
    ids = torch.randint(50_257, (8, length))
    return model, {"input_ids": ids, "labels": ids.clone()}


def hf_llama(layers: int, hidden: int, heads: int, length: int) -> tuple[Any, Any]:
    """A tiny one, whose comparison takes the whole batch, or one of a billion parameters, which is compared in part."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads,
        num_key_value_heads=heads // 4, vocab_size=32_000 if hidden > 1000 else 512,
    )  # fmt: skip
    ids = torch.randint(512, (8, length))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def wide_resnet() -> tuple[Any, Any]:
    """WideResNet-50-2 on images of 224 × 224, with batch norms that make both steps count."""
    from models import wide_resnet

    config = wide_resnet.wide_resnet50_2()
    return wide_resnet.build(config), wide_resnet.example_inputs(config)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "HF GPT-2, 8 × 128": lambda: hf_gpt2(128),
    "HF GPT-2, 8 × 1,024": lambda: hf_gpt2(1024),
    "HF Llama, tiny, 8 × 32": lambda: hf_llama(4, 64, 8, 32),
    "HF Llama, 1 billion, 8 × 1,024": lambda: hf_llama(14, 2048, 32, 1024),
    "WideResNet-50-2": wide_resnet,
    "HF GPT-2 on meta, 8 × 1,024": lambda: hf_gpt2(1024, "meta"),
}


def planned(name: str) -> dict[str, Any]:
    """Plans one model in this process."""
    import torch

    import autopar
    from autopar import pipeline

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    own, took, grew = pipeline.held_against_eager, [0.0], [0]

    def held(*args: Any, **options: Any) -> str:
        began, before = time.process_time(), _peak_mb()
        said = own(*args, **options)
        took[0], grew[0] = time.process_time() - began, _peak_mb() - before
        return said

    pipeline.held_against_eager = held
    began = time.process_time()
    program = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=4), inputs)
    return {
        "said": program.plan.checked_against_eager, "guard_s": took[0], "whole_s": time.process_time() - began,
        "grew_mb": grew[0], "weights_mb": sum(p.nbytes for p in model.parameters()) // 2**20,
    }  # fmt: skip


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10


def main(repeats: int = 3) -> None:
    """Writes the medians down."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(repeats):
        for name, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.guard.run", "--one", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(name, runs[-1], flush=True)
    write_record(HERE / "results", facts("benchmarks.guard.run"), {"models": found}, _page(found, repeats))


def _page(found: dict[str, list[dict[str, Any]]], repeats: int) -> str:
    head = ("model", "`parallelize`, s", "comparison, s", "share", "weights, MB", "memory beside, MB", "the plan says")
    rows = [head, ("---",) * len(head), *(_row(name, runs) for name, runs in found.items())]
    return "\n".join([
        "What holding the traced graph against the model takes of `autopar.parallelize` for four h100, default search:",
        f"processor seconds of one thread, medians of {repeats} runs in processes of their own, models in turn;",
        "the share is of the same run. Memory beside weights and tracing: what the process's peak grew by.", "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ])  # fmt: skip


def _row(name: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    share = statistics.median(run["guard_s"] / run["whole_s"] for run in runs)
    whole, guard, weights, grew = (_median(runs, key) for key in ("whole_s", "guard_s", "weights_mb", "grew_mb"))
    return name, f"{whole:.1f}", f"{guard:.2f}", f"{share:.1%}", f"{weights:,.0f}", f"{grew:,.0f}", runs[0]["said"]


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(planned(sys.argv[2])))
    else:
        main(*map(int, sys.argv[1:]))
