"""One rung of the ladder, searched by itself in a process of its own, as a user calls `parallelize(search="fast")`.

    python -m benchmarks.ladder.alone h100 64 384

Prints what it found as JSON: the step, how surely the plan fits, the plan in words, and processor seconds from the
model on, without what importing takes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.ladders.text import outline_text
from autopar.pipeline import planned_jointly
from autopar.request import BUDGETS, Request
from autopar.trace import trace
from models import llama


def model_and_inputs(batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Llama-3-8B in bfloat16, without weights."""
    config = llama.llama3_8b()
    with torch.device("meta"):
        model = llama.build(config).to(torch.bfloat16)
    tokens = torch.empty((batch, config.seq_len), dtype=torch.long, device="meta")
    return model, {"tokens": tokens, "labels": tokens}


def mesh(kind: str, devices: int) -> autopar.Mesh:
    """Nodes of eight."""
    return autopar.Mesh(kind, nodes=devices // 8, devices_per_node=8)


def alone(kind: str, devices: int, batch: int) -> dict[str, Any]:
    """The search's plan, or why there is none."""
    began = time.process_time()
    found: dict[str, Any] = {}
    try:
        graph = trace(*model_and_inputs(batch))
        asked = Request(mesh(kind, devices), "train", "adamw", None, (), BUDGETS["fast"])
        plan = planned_jointly(graph, asked)[1]
        told = plan.predicted
        found |= {"own_ns": told.step_time_ns, "own_fits": told.fits_probability, "own_plan": outline_text(plan)}
    except AutoparError as error:
        found |= {"own_ns": None, "own_plan": str(error)}
    return {**found, "processor_s": round(time.process_time() - began, 1)}


if __name__ == "__main__":
    print(json.dumps(alone(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
