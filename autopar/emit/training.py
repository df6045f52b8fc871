"""The script that is saved beside an emitted program: a loop to start from, which in training survives lost ranks."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.algorithm import BACKUP, PIPEDREAM
from autopar.ir.offload import uses_host
from autopar.ir.plan import COMPILED, Plan

_BATCHES = """def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {
            spec.name: torch.randint(0, 2, spec.shape, generator=generator)
            if not spec.dtype.is_floating_point
            else torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
            for spec in program.Program.INPUTS
        }


"""

_ON_HOST = "next(iter(rank.parameters())).is_cuda", 'rank.device.type == "cuda"'
"""Which parameter a rank has first says nothing of the device where some are on the host."""

_WITHIN_STEPS = (
    (
        "    schedule = torch.optim",
        "    rank.update_with(optimizer)  # within steps, after each microbatch\n    schedule = torch.optim",
    ),
    ("norm = rank.clip_grad_norm_(options.clip)", "norm = torch.zeros(())  # gradients are gone, and were not clipped"),
)
"""Of pipedream: the script's lines, and what is there instead."""

_WITHOUT_THE_LAST = (
    (
        "    own_time = rt.OwnTime(rank) if options.log_file else None\n",
        "    own_time = None  # ranks would wait for each other to tell it\n",
    ),
    (
        "    if torch.distributed.is_initialized():\n        torch.distributed.destroy_process_group()\n",
        "    rank.unite_copies()  # others may still take what this rank has summed for them\n"
        "    torch.distributed.destroy_process_group()\n",
    ),
)
"""Of backup, alike."""

_COMPILES = "    rank.compile()  # as the plan says\n"

_SERVES = """    if rt.is_server(program.Program):
        rt.serve(program.Program, timeout_s=300)  # until the workers end
        return
"""

_INITIALISE = """@torch.no_grad()
def initialise(rank: rt.Rank, weights: Path | None = None) -> str:
    own = HERE / "weights.pt"
    if own.exists():
        rank.init_from(torch.load(own, weights_only=True), broadcast=False)
    elif weights is None:  # planned from a meta model: random matrices, everything else one
        for number, parameter in enumerate(rank.parameters()):
            torch.manual_seed(number)  # ranks that hold the same draw the same
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
            local.normal_(std=0.02) if parameter.dim() > 1 else local.fill_(1.0)
        rank.unite_tied()
    torch.manual_seed(0)
    if weights is not None:
        return str(rank.load_safetensors(weights))
    return "" if own.exists() else f"random weights, as there is no {own.name} beside this file"


"""

_TEXT = '''def text_tokens(files: list[Path], tokenizer: str | None) -> torch.Tensor:
    """The tokens of all files, each ended as the tokenizer ends texts, if it does; without a tokenizer bytes."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if tokenizer is None:
        return torch.tensor(list("\\n".join(texts).encode()))
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tokenizer)
    found = []
    for text in texts:
        found += made(text, verbose=False)["input_ids"]
        if made.eos_token_id is not None and found[-1:] != [made.eos_token_id]:
            found.append(made.eos_token_id)
    return torch.tensor(found)


def tokenizer_of(options: argparse.Namespace) -> str | None:
    """That of --tokenizer, or else what lies beside the weights; None for bytes."""
    if options.tokenizer:
        return None if options.tokenizer == "bytes" else options.tokenizer
    has_one = options.weights is not None and (options.weights / "tokenizer_config.json").is_file()
    return str(options.weights) if has_one else None


def text_batches(files: list[Path], tokenizer: str | None, seed: int | None):
    """Pieces of text of the length that the program was planned for, shuffled if there is a seed."""
    rows, length = program.Program.INPUTS[0].shape
    tokens = text_tokens(files, tokenizer)
    names = [spec.name for spec in program.Program.INPUTS]
    shift = int(len(names) == 2 and names != ["input_ids", "labels"])  # where models do not shift labels themselves
    starts = range(0, len(tokens) - length - shift + 1, length)
    read, wanted = ([tokens[at + by : at + by + length] for at in starts] for by in (0, shift))
    pieces = [dict(zip(names, pair)) for pair in zip(read, wanted, strict=True)]
    if len(pieces) < rows:
        raise SystemExit(f"expected text of {{rows * length}} tokens for a batch, found {{len(tokens)}}")
    order = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(
        pieces, batch_size=rows, shuffle=order is not None, drop_last=True, generator=order
    )


'''

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


{batches}{text}{initialise}def main(options: argparse.Namespace) -> None:
    rt.keep_freed_memory()  # of tensors on the CPU, for the next step
    rank = rt.build(program.Program, timeout_s=300)  # how long ranks wait for one that is slow or lost
{compiles}    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    told = initialise(rank, options.weights)
    if told and is_first:
        print(told, flush=True)
    data = text_batches(options.text, tokenizer_of(options), None) if options.text else batches()
    kept = []
    with torch.no_grad():
        for step, batch in enumerate(itertools.islice(data, options.steps)):
            outputs = rank(**batch)
            if is_first:
                kept += [(batch, outputs)] if options.outputs else []
                outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
                told = (f"{{list(output.shape)}} mean {{output.double().mean().item():.4g}}" for output in outputs)
                print(f"step {{step}} {{', '.join(told)}}", flush=True)
    if options.outputs and is_first:
        torch.save(kept, options.outputs)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--weights", type=Path, help="a folder of save_pretrained's")
    parser.add_argument("--text", type=Path, nargs="+", help="files to read, in the place of batches()")
    parser.add_argument("--tokenizer", help="a folder of transformers' tokenizer; by default the weights', else bytes")
    parser.add_argument("--outputs", type=Path, help="a file for all batches and their outputs, by torch.save")
    main(parser.parse_args())
'''

_TRAIN = '''"""Trains the program beside this file: torchrun --nproc-per-node {world} train.py [OPTIONS], see --help

Replace `batches()` by your data: a DataLoader, or any iterable of dicts; each item is one global batch, the same on
every rank. Checkpoints are written every few steps or minutes and when a signal ends the run; training goes on from the
last one: when ranks were lost (`torchrun --max-restarts 3` starts them anew by itself), or under another plan of the
same model, on any number of ranks. All ranks must see the folders.

With --elastic LADDER, training also goes on when nodes are lost for good or come back: under the ladder's largest
program that those that are left are enough for, from the last step (`autopar launch --elastic` starts it so).
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch

import program
from autopar import runtime as rt

HERE = Path(__file__).parent
PREDICTED_S = {predicted_s}  # a step, by plan.json
STEP_FLOPS = {step_flops}  # of the model, forward and backward, without what runs twice
PEAK_FLOPS = {peak_flops}  # a second, of all devices together, {dtype}


{batches}{text}{initialise}def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Of a step, as a share of the largest: a linear warm-up, then constant, or down to a tenth by a cosine."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return 1.0
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def warm_up_advice(options: argparse.Namespace, factor: float) -> str:
    """Where a rate is larger than the one that is known to be right."""
    if factor <= 1:
        return ""
    if options.warmup_steps:
        return f", warmed up over {{options.warmup_steps}} steps"
    return "; reach it by degrees, with --warmup-steps"


@torch.no_grad()
def evaluate(rank: rt.Rank, loader, count: int) -> float:
    """The mean loss of some batches, in the mode that the program was planned in; buffers stay as they are."""
    kept = [(buffer, buffer.clone()) for buffer in rank.buffers()]
    losses = []
    for _, batch in zip(range(count), rank.batches(loader, short="drop"), strict=False):
        outputs = rank(**batch)
        losses.append(outputs if torch.is_tensor(outputs) else outputs[program.Program.LOSS_INDEX])
    for buffer, before in kept:
        buffer.copy_(before)
    return torch.stack(losses).mean().item()


def join(options: argparse.Namespace) -> rt.Elastic:
    return rt.Elastic(
        options.elastic, options.checkpoints, every=options.keep_every, mirrors=options.mirrors,
        snapshots=options.snapshots,
    )


def tell(figures: dict, log) -> None:
    """What going on took, on one line, and in the log."""
    line = f"moved {{figures['moved_bytes']:,}} bytes between ranks, loaded in {{figures['load_s']:.3f}} s"
    if "pause_s" in figures:
        line += f"; paused {{figures['pause_s']:.1f}} s (predicted {{figures['predicted_pause_s']:.1f}} s)"
    print(line, flush=True)
    if log is not None:
        print(json.dumps(figures), file=log, flush=True)


def kept(elastic: rt.Elastic) -> str:
    """The price of what is kept of a step."""
    line = f"keeps {{elastic.kept_bytes:,}} bytes of each of two steps, in {{elastic.kept_s * 1000:.0f}} ms a step"
    return f"{{line}}; {{elastic.mirrored_bytes:,}} bytes of them are sent to other nodes"


def told(figures: dict) -> str:
    """A step's figures on one line."""
    line = f"step {{figures['step']}} loss {{figures['loss']:.4f}}"
    line += f" norm {{figures['norm']:.3g}} lr {{figures['lr']:.3g}} took {{figures['step_s'] * 1000:.0f}} ms"
    line += f" (predicted {{figures['predicted_s'] * 1000:.0f}} ms), {{figures['samples_per_s']:.4g}} samples/s"
    line += f", {{figures['mfu']:.1%}} of peak"
    return line + (f", evaluation loss {{figures['eval_loss']:.4f}}" if "eval_loss" in figures else "")


def main(options: argparse.Namespace) -> None:
    rt.keep_freed_memory()  # of tensors on the CPU, for the next step
{serves}    elastic = join(options) if options.elastic else None
    if elastic is not None and elastic.is_spare:
        elastic.serve()
        return
    planned = elastic.program if elastic is not None else program.Program
    predicted_s = elastic.rung.predicted_s if elastic is not None else PREDICTED_S
    rank = rt.build(planned, timeout_s=300)  # how long ranks wait for one that is slow or lost
{compiles}    is_on_gpu = next(iter(rank.parameters())).is_cuda  # where one fused kernel is three times as fast
    rate = options.lr
    if options.base_batch:
        suggested = rank.suggested_learning_rate(options.lr, options.base_batch, optimizer=torch.optim.AdamW)
        rate = float(suggested)
    optimizer = torch.optim.AdamW(
        rank.parameters(), lr=rate, weight_decay=options.weight_decay, fused=is_on_gpu or None
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(options, step))
    tokenizer = tokenizer_of(options)
    loader = text_batches(options.text, tokenizer, options.seed) if options.text else batches()
    held_out = text_batches(options.eval_text, tokenizer, None) if options.eval_text else None
    data = rank.batches(loader, epochs=None)
    is_first = rank.number == 0
    started = initialise(rank, options.weights)
    extra = {{"schedule": schedule, "data": data}}
    resumed = elastic.restore(rank, optimizer, extra) if elastic is not None else None
    start = rt.load_checkpoint(options.checkpoints, rank, optimizer, extra=extra) if resumed is None else resumed.step
    if resumed is not None and start:
        started = f"goes on after step {{start - 1}}, of {{resumed.source}}, on {{elastic.rung.name}}"
    elif start:
        started = f"goes on after step {{start - 1}}, from {{rt.last_checkpoint(options.checkpoints)}}"
        started += ", at its learning rate" if options.base_batch else ""
    elif rate != options.lr and is_first:
        print(f"{{suggested}}{{warm_up_advice(options, suggested.factor)}}", flush=True)
    if started and is_first:
        print(started, flush=True)
    if start >= options.steps and is_first:
        print(f"no step is left of {{options.steps}}: ask for more by --steps", flush=True)
    watch = rt.Watch(rank, every=options.save_every, minutes=options.save_minutes)
    log = options.log_file.open("a") if options.log_file and is_first else None
    if resumed is not None and start and is_first:
        tell(elastic.told(resumed), log)
    own_time = rt.OwnTime(rank) if options.log_file else None
    began, done = time.perf_counter(), start
    for step, batch in zip(range(start, options.steps), data, strict=False):
        optimizer.zero_grad()
        loss = rank.train_step(**batch)
        norm = rank.clip_grad_norm_(options.clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        figures = {{"step": step, "loss": loss.item(), "norm": norm.item(), "lr": rate}}
        figures["step_s"] = time.perf_counter() - began
        figures["predicted_s"] = predicted_s
        if own_time is not None and (own_s := own_time.by_rank()) is not None:
            figures["own_s"] = own_s  # of each rank, without what it waited for others
        figures["samples_per_s"] = program.Program.INPUTS[0].shape[0] / figures["step_s"]
        figures["mfu"] = STEP_FLOPS / figures["step_s"] / PEAK_FLOPS
        if held_out is not None and (step + 1) % options.eval_every == 0:
            figures["eval_loss"] = evaluate(rank, held_out, options.eval_batches)
        if is_first:
            print(told(figures), flush=True)
        if log is not None:
            print(json.dumps(figures), file=log, flush=True)
        done = step + 1
        if elastic is not None:
            elastic.keep(rank, optimizer, done, extra)
            if done == start + 2 and is_first:  # the first makes arrangements
                print(kept(elastic), flush=True)
        due = watch.after(step + 1, options.steps)
        if due.save:
            began = time.perf_counter()
            rt.save_checkpoint(options.checkpoints, rank, optimizer, step=step + 1, extra=extra)
            if elastic is not None:
                elastic.saved_s = time.perf_counter() - began
        if due.stop:
            break
        began = time.perf_counter()
        if own_time is not None:
            own_time.restart()
    if elastic is not None and done >= options.steps:
        elastic.end()
    if options.export and (elastic is None or done >= options.steps):
        export(rank, options.export, options.weights, is_first)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if elastic is not None and done < options.steps:
        raise SystemExit(75)  # it is to go on: torchrun takes 0 for the end of all


def export(rank: rt.Rank, folder: Path, weights: Path | None, is_first: bool) -> None:
    """Writes Hugging Face's files, with the config and the tokenizer that lie beside the weights it began with."""
    rank.save_safetensors(folder)
    if is_first and weights is not None and weights.is_dir():
        for file in weights.iterdir():
            if file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder / file.name)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--base-batch", type=int, help="samples of a step that --lr is for, where a step has others")
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of all gradients")
    parser.add_argument("--seed", type=int, default=0, help="of the order of text")
    parser.add_argument("--weights", type=Path, help="a folder of save_pretrained's to begin with")
    parser.add_argument("--text", type=Path, nargs="+", help="files to train on, in the place of batches()")
    parser.add_argument("--tokenizer", help="a folder of transformers' tokenizer; by default the weights', else bytes")
    parser.add_argument("--eval-text", type=Path, nargs="+", help="files to evaluate on")
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--save-minutes", type=float, help="minutes from one checkpoint to the next")
    parser.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints", help="may be another plan's")
    parser.add_argument("--log-file", type=Path, help="a file for each step's figures, a JSON object a line")
    parser.add_argument("--elastic", type=Path, help="a folder of `autopar ladder --elastic`: nodes may go and come")
    parser.add_argument("--keep-every", type=int, default=1, help="of --elastic: steps between two that are kept")
    parser.add_argument("--mirrors", type=int, default=1, help="of --elastic: nodes that keep what one alone has")
    parser.add_argument("--snapshots", type=Path, help="of --elastic: where a node keeps steps; default: its memory")
    parser.add_argument("--export", type=Path, help="a folder for the trained weights, in Hugging Face's files")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())
'''


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a log holds a step against: the floating-point operations of the model's step, and those that all devices
    together can do in a second, in a dtype."""

    step_flops: float = 0.0
    peak_flops: float = 1.0
    dtype: str = "float32"


def script_name(plan: Plan) -> str:
    """train.py, or for inference evaluate.py."""
    return "train.py" if plan.mode == "train" else "evaluate.py"


def script(plan: Plan, figures: StepFigures) -> str:
    """The text of the script for a plan."""
    text = _TRAIN if plan.mode == "train" else _EVALUATE
    text = text.format(
        world=plan.num_processes, serves=_SERVES if plan.uses_servers else "", batches=_BATCHES, text=_TEXT.format(),
        initialise=_INITIALISE, dtype=figures.dtype,
        predicted_s=f"{plan.predicted.step_time_ns / 1e9:.6g}", step_flops=f"{figures.step_flops:.4g}",
        peak_flops=f"{figures.peak_flops:.4g}", compiles=_COMPILES if plan.runs == COMPILED else "",
    )  # fmt: skip
    if plan.algorithm is not None and plan.algorithm.name == PIPEDREAM:
        for old, new in _WITHIN_STEPS:
            text = text.replace(old, new)
    if plan.algorithm is not None and plan.algorithm.name == BACKUP:
        for old, new in _WITHOUT_THE_LAST:
            text = text.replace(old, new)
    return text.replace(*_ON_HOST) if uses_host(plan) else text
