"""Whole training steps of emitted programs on one GPU, beside what was predicted of them.

    python -m benchmarks.accuracy.steps_on_gpu plan FOLDER        # here: plans, emits and predicts every case
    python benchmarks/accuracy/steps_on_gpu.py measure FOLDER CASE [--fused] [--tf32] [--compiled]    # there

`measure` needs torch and `autopar.runtime` alone, and prints a JSON line: milliseconds of a step back to back and of
one alone (median), of its update, of the host's thread to issue it; the allocator's peaks, and the device's memory
outside of it. A process measures one case, so that nothing of another is in its peaks.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

GPT2 = {"vocab_size": 50304, "tie_head": True}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt", {**GPT2, "num_layers": 12, "hidden_size": 768, "num_heads": 12}),
    "gpt2xl": ("gpt", {**GPT2, "num_layers": 48, "hidden_size": 1600, "num_heads": 25}),
    "llama1b": (
        "llama",
        {"vocab_size": 32000, "num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8,
         "mlp_size": 8192},
    ),
}  # fmt: skip
#: by name: size, batch, length, precision, recomputation
CASES: dict[str, tuple[str, int, int, str | None, str]] = {
    "gpt2_8x1024_fp32": ("gpt2", 8, 1024, None, "none"),
    "gpt2_8x1024_bf16": ("gpt2", 8, 1024, "bf16", "none"),
    "gpt2_32x1024_bf16_full": ("gpt2", 32, 1024, "bf16", "full"),
    "gpt2xl_4x1024_bf16": ("gpt2xl", 4, 1024, "bf16", "none"),
    "gpt2xl_8x1024_bf16_full": ("gpt2xl", 8, 1024, "bf16", "full"),
    "llama1b_4x2048_bf16": ("llama1b", 4, 2048, "bf16", "none"),
    "llama1b_4x2048_bf16_block": ("llama1b", 4, 2048, "bf16", "block"),
    "llama1b_1x16384_bf16": ("llama1b", 1, 16384, "bf16", "block"),
    "llama1b_8x1024_bf16": ("llama1b", 8, 1024, "bf16", "none"),
    "llama1b_2x4096_fp32": ("llama1b", 2, 4096, None, "full"),
    "hf1b_4x2048_bf16": ("hf1b", 4, 2048, "bf16", "none"),
    "hf1b_1x8192_bf16_full": ("hf1b", 1, 8192, "bf16", "full"),
}


def model_of(size: str, batch: int, length: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """On the meta device, with a batch."""
    with torch.device("meta"):
        if size == "hf1b":
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=length, use_cache=False,
            )  # fmt: skip
            ids = torch.empty(batch, length, dtype=torch.long)
            return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
        name, sizes = SIZES[size]
        module = importlib.import_module(f"models.{name}")
        own = module.Config(seq_len=length, batch_size=batch, **sizes)
        return module.build(own), module.example_inputs(own)


def plan(folder: Path) -> None:
    """Emits every case, and writes what is predicted of it, eager and compiled."""
    import autopar

    mesh, rows = autopar.Mesh("h100", devices_per_node=1), {}
    for name, (size, batch, length, precision, recompute) in CASES.items():
        model, inputs = model_of(size, batch, length)
        found = autopar.template_plan(model, mesh, inputs, precision=precision, recompute=recompute)
        autopar.parallelize(model, mesh, inputs, plan=found, precision=precision).save(folder / name)
        for ran in (found, found.compiled()):
            told = ran.predicted
            rows[name + (" compiled" if ran is not found else "")] = {
                "step_time_ns": told.step_time_ns, "peak_bytes": told.peak_bytes, "taken_bytes": told.taken_bytes
            }  # fmt: skip
            (folder / "predicted.json").write_text(json.dumps(rows, indent=1) + "\n")


def measure(folder: Path, case: str, flags: list[str]) -> dict[str, Any]:
    """One case on this machine's GPU."""
    from autopar import runtime as rt

    torch.backends.cuda.matmul.allow_tf32 = "--tf32" in flags
    spec = importlib.util.spec_from_file_location("program", folder / case / "program.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    rank = rt.build(program.Program, device="cuda")
    with torch.no_grad():
        for parameter in rank.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    if "--compiled" in flags:
        rank.compile()
    optimizer = torch.optim.AdamW(rank.parameters(), lr=1e-5, fused="--fused" in flags or None)
    batch = {item.name: torch.randint(0, 250, item.shape, device="cuda") for item in program.Program.INPUTS}
    return {"case": case, "flags": flags, **_timed(rank, optimizer, batch)}


def _timed(rank: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def step() -> None:
        optimizer.zero_grad()
        rank.train_step(**batch)
        middle.record()
        optimizer.step()

    alone, updates, issues = [], [], []
    for number in range(16):
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        step()
        end.record()
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        if number >= 4:
            alone.append(begin.elapsed_time(end))
            updates.append(middle.elapsed_time(end))
            issues.append(1000 * issued)
    start = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "running_ms": 100 * (time.perf_counter() - start), "ms": statistics.median(alone),
        "update_ms": statistics.median(updates), "issue_ms": statistics.median(issues),
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        plan(Path(sys.argv[2]))
    else:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])))
