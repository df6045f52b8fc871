"""The script that is saved beside an emitted program: a loop to start from, which in training survives lost ranks."""

from __future__ import annotations

from autopar.ir.plan import Plan

_SHARED = """def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {
            spec.name: torch.randint(0, 2, spec.shape, generator=generator)
            if not spec.dtype.is_floating_point
            else torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
            for spec in program.Program.INPUTS
        }


@torch.no_grad()
def initialise(rank: rt.Rank) -> str:
    weights = HERE / "weights.pt"
    if weights.exists():
        rank.init_from(torch.load(weights, weights_only=True), broadcast=False)
    else:  # planned from a meta model: random matrices, everything else one
        for number, parameter in enumerate(rank.parameters()):
            torch.manual_seed(number)  # ranks that hold the same draw the same
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            local.normal_(std=0.02) if parameter.dim() > 1 else local.fill_(1.0)
        rank.unite_tied()
    torch.manual_seed(0)
    return "" if weights.exists() else f"random weights, as there is no {weights.name} beside this file"


"""

_EVALUATE = '''"""Runs the program beside this file: torchrun --nproc-per-node {world} evaluate.py

Replace `batches()` by your data: each item is one global batch, the same on every rank. Every output is whole on every
rank.
"""

import argparse
import itertools
from pathlib import Path

import torch

import program
from autopar import runtime as rt

HERE = Path(__file__).parent


{shared}def main(steps: int) -> None:
    rt.keep_freed_memory()  # of tensors on the CPU, for the next step
    rank = rt.build(program.Program, timeout_s=300)  # how long ranks wait for one that is slow or lost
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    told = initialise(rank)
    if told and is_first:
        print(told, flush=True)
    with torch.no_grad():
        for step, batch in enumerate(itertools.islice(batches(), steps)):
            outputs = rank(**batch)
            if is_first:
                outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
                told = (f"{{list(output.shape)}} mean {{output.double().mean().item():.4g}}" for output in outputs)
                print(f"step {{step}} {{', '.join(told)}}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    main(parser.parse_args().steps)
'''

_TRAIN = '''"""Trains the program beside this file: torchrun --nproc-per-node {world} train.py

Replace `batches()` by your data: each item is one global batch, the same on every rank. Every few steps a checkpoint
is written, and training goes on from the last one: when ranks were lost (`torchrun --max-restarts 3` starts them anew
by itself), or under another plan of the same model, on any number of ranks. All ranks must see the folder.
"""

import argparse
import itertools
from pathlib import Path

import torch

import program
from autopar import runtime as rt

HERE = Path(__file__).parent


{shared}def main(steps: int, save_every: int, checkpoints: Path) -> None:
    rt.keep_freed_memory()  # of tensors on the CPU, for the next step
    rank = rt.build(program.Program, timeout_s=300)  # how long ranks wait for one that is slow or lost
    optimizer = torch.optim.AdamW(rank.parameters(), lr=3e-4)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    told = initialise(rank)
    start = rt.load_checkpoint(checkpoints, rank, optimizer)
    if start:
        told = f"goes on after step {{start - 1}}, from {{rt.last_checkpoint(checkpoints)}}"
    if told and is_first:
        print(told, flush=True)
    if start >= steps and is_first:
        print(f"no step is left of {{steps}}: ask for more by --steps", flush=True)
    for step, batch in enumerate(itertools.islice(batches(), start, steps), start):
        optimizer.zero_grad()
        loss = rank.train_step(**batch)
        rank.clip_grad_norm_(1.0)
        optimizer.step()
        if is_first:
            print(f"step {{step}} loss {{loss.item():.4f}}", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            rt.save_checkpoint(checkpoints, rank, optimizer, step=step + 1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints", help="may be another plan's")
    options = parser.parse_args()
    main(options.steps, options.save_every, options.checkpoints)
'''


def script(plan: Plan) -> tuple[str, str]:
    """The name and the text of the script for a plan: train.py, or for inference evaluate.py."""
    name, text = ("train.py", _TRAIN) if plan.mode == "train" else ("evaluate.py", _EVALUATE)
    return name, text.format(world=plan.mesh.num_devices, shared=_SHARED)
