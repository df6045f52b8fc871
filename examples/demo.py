"""Plans, emits and trains a byte-level GPT of about 10M parameters on 4 CPU ranks, beside the single-device run.

Text: the sources of Python's standard library, which every machine has. Run by `make demo`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

STEPS, WORLD = 20, 4
ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "demo"
sys.path.insert(0, str(ROOT))

from models import gpt  # noqa: E402  (the checkout's example models)

CONFIG = gpt.Config(vocab_size=256, seq_len=128, hidden_size=384, num_layers=6, num_heads=6, batch_size=8)


def batches() -> list[dict[str, torch.Tensor]]:
    """STEPS global batches of bytes: labels are the next bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files[:120])), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    length = CONFIG.seq_len
    found = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - length - 1, (CONFIG.batch_size,), generator=generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        found.append({"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()})
    return found


def train(step, parameters) -> tuple[list[float], list[float]]:
    """Losses and seconds of STEPS steps; `step(batch)` leaves gradients and returns the loss."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)
    losses, seconds = [], []
    for batch in batches():
        started = time.perf_counter()
        optimizer.zero_grad()
        losses.append(float(step(batch)))
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def run_rank() -> None:
    """What torchrun starts: trains the emitted program and leaves its losses in a file."""
    from autopar import runtime
    from autopar.program import load_source

    torch.set_num_threads(1)
    rank = runtime.build(load_source((OUT / "program.py").read_text()).Program)
    rank.init_from(torch.load(OUT / "weights.pt", weights_only=True), broadcast=False)
    losses, seconds = train(lambda batch: rank.train_step(**batch), rank.parameters())
    if torch.distributed.get_rank() == 0:
        (OUT / "sharded.json").write_text(json.dumps([losses, seconds]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_single(model: torch.nn.Module) -> tuple[list[float], list[float]]:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch)
        loss.backward()
        return loss.detach()

    return train(step, model.parameters())


def main() -> None:
    import autopar

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt.build(CONFIG)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"GPT with {count / 1e6:.1f}M parameters on {WORLD} CPU ranks\n")
    started = time.perf_counter()
    program = autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=WORLD), batches()[0])
    print(f"planned and emitted in {time.perf_counter() - started:.1f} s\n\n{program.plan}\n")
    program.save(OUT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, "--rank"], check=True, env=environment)
    sharded, seconds = json.loads((OUT / "sharded.json").read_text())
    single, single_seconds = run_single(model)
    print("step   single   sharded")
    for step, (one, other) in enumerate(zip(single, sharded, strict=True)):
        print(f"{step:4d}  {one:7.4f}   {other:7.4f}")
    worst = max(abs(one - other) for one, other in zip(single, sharded, strict=True))
    measured = statistics.median(seconds[2:])
    print(f"\nlargest difference of the losses: {worst:.2e}")
    print(f"step time: predicted {program.plan.predicted.step_time_ns / 1e6:.0f} ms, measured {measured * 1e3:.0f} ms")
    print(f"(single device: {statistics.median(single_seconds[2:]) * 1e3:.0f} ms)\nfiles: {OUT}")
    if worst > 1e-2:
        sys.exit("the sharded run does not follow the single-device run")


if __name__ == "__main__":
    run_rank() if "--rank" in sys.argv else main()
