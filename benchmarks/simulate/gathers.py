"""How much of a step waits for parameters and gradients of templates that store shards: simulated, by model and plan.

    python -m benchmarks.simulate.gathers

Llama-3-8B, 256 sequences of 8,192 on 64 h100, and Llama-3-405B with 128 layers, 2,048 sequences on 16,384. Exposed is
what compute waits for. What was printed, and when, is in README.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import autopar
from models import llama

SMALL = replace(llama.llama3_8b(), batch_size=256)
LARGE = replace(
    llama.llama3_70b(), num_layers=128, hidden_size=16_384, num_heads=128, mlp_size=53_248, batch_size=2048
)  # fmt: skip
ROWS: list[tuple[str, llama.Config, int, dict[str, Any]]] = [
    ("8B", SMALL, 8, {"dp": 64, "zero": 2, "microbatches": 4}),
    ("8B", SMALL, 8, {"dp": 64, "zero": 3, "microbatches": 4}),
    ("8B", SMALL, 8, {"dp": 64, "hsdp": 8, "zero": 3, "microbatches": 4}),
    (
        "405B", LARGE, 2048,
        {
            "dp": 128, "tp": 8, "pp": 16, "zero": 1, "microbatches": 16, "schedule": "interleaved", "chunks": 8,
            "sequence_parallel": True, "memory_limit": 400 * 10**9,
        },
    ),
]  # fmt: skip


def row(config: llama.Config, nodes: int, options: dict[str, Any]) -> str:
    """The step, and of it what waits for parameters, and for gradients."""
    with torch.device("meta"):
        model = llama.build(config).to(torch.bfloat16)
    batch = {name: tensor.to("meta") for name, tensor in llama.example_inputs(config).items()}
    plan = autopar.template_plan(model, autopar.Mesh("h100", nodes=nodes, devices_per_node=8), batch, **options)
    exposed: dict[str, int] = plan.timeline().exposed
    parts = (sum(ns for kind, ns in exposed.items() if kind.startswith(of)) for of in ("parameter", "gradient"))
    waits, home = (f"{ns / 1e6:.1f} ms" for ns in parts)
    step, peak = plan.predicted.step_time_ns / 1e9, plan.predicted.peak_bytes / 1e9
    return f"{step:.4f} s, {waits} for parameters, {home} for gradients, {peak:.1f} GB"


def main() -> None:
    """Prints all rows."""
    for name, config, nodes, options in ROWS:
        print(name, ", ".join(f"{key}={value}" for key, value in options.items()), end=": ", flush=True)
        print(row(config, nodes, options), flush=True)


if __name__ == "__main__":
    main()
