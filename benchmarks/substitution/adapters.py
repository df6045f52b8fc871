"""What there is to gain on a Llama block with low-rank adapters: forms of it written by hand, timed in turns on a CPU.

    python -m benchmarks.substitution.adapters [--rounds 9]

"scaled inside": the scale on the few features of an adapter. "in the product": torch.addmm adds what an adapter makes,
scaled, to the frozen product. "folded": one product with base + scale × B·A, made in each step. "no adapters": without
them, which is no equal form but the bound of all that leave the frozen products as they are.
One thread; gains are medians of the rounds' ratios of processor time, as in `run`; "again" is the first form once more.
Printed and written to adapters.json and adapters.md with command, machine, load and date.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import runtime
from benchmarks.facts import facts, write_record
from benchmarks.substitution.graphs import SIZES
from benchmarks.substitution.timing import Call, gain, times
from models import llama_lora

HERE = Path(__file__).parent


class Scaled(llama_lora.Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.scaling * self.down(x))


class InTheProduct(llama_lora.Adapted):
    def forward(self, x: Tensor) -> Tensor:
        made, few = self.base(x), self.down(x)
        return torch.addmm(
            made.flatten(0, -2), few.flatten(0, -2), self.up.weight.t(), alpha=self.scaling
        ).view_as(made)  # fmt: skip


class Folded(llama_lora.Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.scaling * (self.up.weight @ self.down.weight))


class Bare(llama_lora.Adapted):
    def forward(self, x: Tensor) -> Tensor:
        made = self.base(x)
        known = made.requires_grad or not torch.is_grad_enabled()
        return made if known else made.requires_grad_()  # what comes after gets its gradient, as with an adapter


FORMS = {
    "as it is": llama_lora.Adapted, "again": llama_lora.Adapted, "scaled inside": Scaled,
    "in the product": InTheProduct, "folded": Folded, "no adapters": Bare,
}  # fmt: skip


def _form(model: nn.Module, kind: type[llama_lora.Adapted]) -> nn.Module:
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, llama_lora.Adapted):
            module.__class__ = kind
    return made


def _call(model: nn.Module, batch: dict[str, Tensor], mode: str) -> Call:
    def step() -> None:
        if mode == "train":
            model.zero_grad()
            model(**batch).backward()
        else:
            with torch.no_grad():
                model(**batch)

    return step


def measured(mode: str, rounds: int) -> dict[str, Any]:
    """Milliseconds, and gain over the block as it is with quartiles, of each form."""
    torch.manual_seed(0)
    config = llama_lora.llama_block()
    model, batch = llama_lora.build(config).train(mode == "train"), llama_lora.example_inputs(config)
    forms = {name: _form(model, kind) for name, kind in FORMS.items()}
    if mode != "train":  # the fold is made once, so that what a step computes is the bare product
        del forms["folded"]
    found = times([_call(form, batch, mode) for form in forms.values()], rounds)
    rows = {}
    for name, taken in zip(forms, found, strict=True):
        gained, (low, high) = gain(found[0].cpu, taken.cpu)
        rows[name] = {
            "ms": round(statistics.median(taken.cpu), 2), "gain": round(gained, 3),
            "quartiles": (round(low, 3), round(high, 3)),
        }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    found = {mode: measured(mode, options.rounds) for mode in ("train", "inference")}
    told = {**facts("benchmarks.substitution.adapters"), "size": SIZES["llama_lora"]}
    lines = ["| mode | form | ms | gain | quartiles |", "|---" * 5 + "|"]
    for mode, rows in found.items():
        lines += [
            f"| {mode} | {name} | {row['ms']:.2f} | {row['gain']:.3f} | {row['quartiles'][0]:.3f} … "
            f"{row['quartiles'][1]:.3f} |"
            for name, row in rows.items()
        ]
    bounds = ", ".join(f"{rows['no adapters']['gain']:.3f} in {mode}" for mode, rows in found.items())
    lines += ["", f"No equal form that leaves the frozen products as they are gains more than what has none: {bounds}."]
    write_record(HERE / "adapters", told, {"forms": found}, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
