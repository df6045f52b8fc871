"""What a user reads, as text: a printed plan, an explanation, an emitted program and the head of a plan's JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch
from torch import nn

import autopar
from autopar.program import PlannedProgram

Golden = Callable[[str, str], None]


class Tiny(nn.Module):
    """A column-parallel, then a row-parallel matrix, once planned for them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return self.down(hidden).square().mean()


def tiny() -> PlannedProgram:
    mesh, model, batch = autopar.Mesh("h100", devices_per_node=4), Tiny(), (torch.zeros(4, 8),)
    plan = autopar.template_plan(model, mesh, batch, dp=2, tp=2)
    return autopar.parallelize(model, mesh, batch, plan=plan)


def without_figures(text: str) -> str:
    """Times and sizes follow the cost model; what is golden is the form."""
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)? (ns|µs|ms|s|B|kB|MB|GB)\b", r"… \3", text) + "\n"


def test_printed_plan(golden: Golden) -> None:
    text = without_figures(str(tiny().plan)).replace(tiny().plan.search.method, "…")
    golden("plan.txt", re.sub(r"… (ns|µs|ms)", "… time", text))


def test_emitted_program(golden: Golden) -> None:
    """From the class on: what is above are imports and a docstring."""
    golden("program.txt", "class Program" + tiny().source.partition("class Program")[2])


def test_head_of_the_plan_file(golden: Golden) -> None:
    data = json.loads(tiny().plan.to_json())
    names = (
        "autopar_plan",
        "model",
        "microbatches",
        "mode",
        "optimizer",
        "precision",
        "mesh",
        "types",
    )
    head = {name: json.dumps(data[name]) for name in names}
    lines = [f"{name}: {value}" for name, value in head.items()]
    others = ", ".join(name for name in data if name not in names)
    golden("plan_head.txt", "\n".join([*lines, f"also: {others}", ""]))
