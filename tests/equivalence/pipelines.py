"""Models of four blocks or more, and the plans of several stages that they are proved in.

`python -m tests.equivalence.pipelines` proves all of them; the tests take a sample.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.trace import trace
from models import gpt, llama, moe, unet
from tests.equivalence.harness import differences, run_rank, run_single
from tests.equivalence.predicted import bytes_by_submesh
from tests.rank_pool import pool

OPTIMIZERS = ("adamw",)

#: options of `template_plan`
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "microbatches": 4},
    "pp4": {"pp": 4, "microbatches": 4},
    "pp_dp": {"pp": 2, "dp": 2, "microbatches": 4},
    "pp_tp": {"pp": 2, "tp": 2, "microbatches": 4},
    "pp_zero1": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 1},
    "pp_zero2": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 2},
    "pp_zero3": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3},
    "pp_recompute": {"pp": 2, "dp": 2, "microbatches": 4, "recompute": "full"},
    "pp_few": {"pp": 2, "microbatches": 1},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights and its batch of 8; the same for the same name."""
    torch.manual_seed(0)
    return MODELS[name]()


def _own(module: Any, **changes: Any) -> Any:
    config = replace(module.Config(), **changes)
    return module.build(config), module.example_inputs(config)


def _tokens() -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 128, (8, 16))
    labels[0, :7] = -100  # microbatches hold unequal counts
    return {"input_ids": torch.randint(0, 128, (8, 16)), "labels": labels}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, n_positions=64, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, bos_token_id=1,
        eos_token_id=1, vocab_size=128, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens()


def _t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0, vocab_size=128,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens()


MODELS = {
    "gpt": lambda: _own(gpt, num_layers=4),
    "llama": lambda: _own(llama, num_layers=4),
    "hf_gpt2": _gpt2,
    "hf_t5": _t5,
    "unet": lambda: _own(unet),
    "moe": lambda: _own(moe, num_layers=4),
}


@cache
def graph(model_name: str) -> Graph:
    """The model's graph on its batch."""
    return trace(*build(model_name))


def plan(model_name: str, plan_name: str, schedule: str) -> Plan:
    """The template's plan. Raises PlanError where the schedule does not go with it."""
    model, batch = build(model_name)
    choices = PLANS[plan_name]
    world = choices["pp"] * choices.get("dp", 1) * choices.get("tp", 1)
    return autopar.template_plan(
        model, autopar.Mesh("cpu", devices_per_node=world), batch, schedule=schedule, **choices
    )  # fmt: skip


@cache
def single(model_name: str) -> Any:
    """What the model computes on one device, in one step and in three of AdamW."""
    return run_single(*build(model_name), OPTIMIZERS)


def faults(model_name: str, plan: Plan) -> list[str]:
    """Runs the plan on gloo ranks. What is out of tolerance, or not as predicted, one line each."""
    model, batch = build(model_name)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(plan.mesh.num_devices).run(run_rank, program.source, state, batch, OPTIMIZERS)
    found = differences(single(model_name), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    for ranks, predicted in bytes_by_submesh(plan, graph(model_name)):
        sent = {rank: results[rank][4] for rank in ranks}
        found += [f"rank {rank} sent {own}, predicted {predicted}" for rank, own in sent.items() if own != predicted]
    return found


def main() -> int:
    """Proves every model in every plan and schedule that goes with it; prints a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--plans", nargs="*", default=[*PLANS])
    parser.add_argument("--schedules", nargs="*", default=[*SCHEDULES])
    options = parser.parse_args()
    wrong = 0
    for model_name, plan_name, schedule in itertools.product(options.models, options.plans, options.schedules):
        try:
            planned = plan(model_name, plan_name, schedule)
        except autopar.AutoparError as error:
            print(f"{model_name} {plan_name} {schedule}: no such plan ({error})", flush=True)
            continue
        found = faults(model_name, planned)
        wrong += bool(found)
        print(f"{model_name} {plan_name} {schedule}: {'; '.join(found) or 'equal'}", flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
