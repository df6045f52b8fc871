"""Proves that models of experts whose tokens are exchanged equal the models: `python -m tests.equivalence.experts`.

Every model × plan × routing × exchange × number of chunks that goes together runs on gloo ranks: loss, each gradient,
clipped norm and weights after three steps are those of one device, and the bytes of each collective as predicted, of
exchanges those of the routing that happened.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import autopar
from autopar.by_hand import template_of_graph
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError
from autopar.ir.graph import Graph
from autopar.profiler.host import cpu_model
from autopar.rewrites import graph_of
from autopar.substitute.sinks import over_sinks, with_sinks
from autopar.trace import trace
from tests.equivalence.harness import Tensors, differences, run_rank, run_single
from tests.equivalence.predicted import bytes_by_submesh
from tests.rank_pool import pool
from tests.routed_bytes import as_routed, bytes_of

OPTIMIZERS = ("sgd", "adamw")
_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "use_cache": False, "max_position_embeddings": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def _mixtral(count: int, **options: Any) -> Any:
    """Seven experts, which ranks do not divide."""
    choices = min(count, 2)
    return transformers.MixtralConfig(
        intermediate_size=24, num_local_experts=7, num_experts_per_tok=choices, **_DECODER, **options
    )


def _gpt_oss(count: int) -> transformers.GptOssConfig:
    return transformers.GptOssConfig(
        intermediate_size=16, num_local_experts=8, num_experts_per_tok=count, head_dim=8, sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **_DECODER
    )  # fmt: skip


#: of a number of choices; the loss that balances experts is a mean over all tokens
MODELS: dict[str, Any] = {
    "mixtral": lambda count: _mixtral(count),
    "mixtral_aux": lambda count: _mixtral(count, output_router_logits=True, router_aux_loss_coef=0.1),
    "qwen3_moe": lambda count: transformers.Qwen3MoeConfig(
        intermediate_size=24, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=count, head_dim=8,
        norm_topk_prob=True, **_DECODER
    ),
    "deepseek": lambda count: transformers.DeepseekV3Config(
        intermediate_size=24, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=count, **_LATENT
    ),
    "gpt_oss": lambda count: _gpt_oss(count),
    "gpt_oss_told": lambda count: _gpt_oss(count),  # its attention told windows and sinks, as of long sequences
}  # fmt: skip

ONE = "one expert"
ROUTINGS = ("balanced", "power law", ONE, "none to a rank")

PLANS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "ep_x4": {"dp": 4, "ep": 4},
    "ep_tp": {"dp": 2, "ep": 2, "tp": 2},
    "ep_over_tp": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "ep_dp": {"dp": 4, "ep": 2},
    "ep_zero3": {"dp": 4, "ep": 2, "zero": 3},
    "ep_pp": {"dp": 2, "ep": 2, "pp": 2, "microbatches": 2},
    "ep_cp": {"dp": 2, "ep": 2, "cp": 2},
    "ep_over_cp": {"cp": 2, "ep": 2},
    "ep_recomputed": {"dp": 2, "ep": 2, "recompute": "full", "microbatches": 2},
    "ep_two_levels": {"dp": 4, "ep": 4, "exchange": "two-level"},
    "ep_dp_tp": {"dp": 4, "ep": 2, "tp": 2},
    "ep_pp_tp": {"dp": 2, "ep": 2, "pp": 2, "tp": 2, "microbatches": 2},
    "ep_two_levels_tp": {"dp": 4, "ep": 4, "tp": 2, "exchange": "two-level"},
    "ep_two_levels_cp": {"dp": 4, "ep": 4, "cp": 2, "exchange": "two-level"},
}


@dataclass(frozen=True)
class Case:
    model: str
    plan: str
    routing: str
    chunks: int

    def __str__(self) -> str:
        return f"{self.model}, {self.plan}, {self.routing}, {self.chunks} chunk{'s' * (self.chunks > 1)}"


def choices_of(routing: str) -> int:
    """How many experts each token chooses."""
    return 1 if routing == ONE else 3


@cache
def build(model_name: str, routing: str) -> tuple[nn.Module, Tensors]:
    """A small model whose router sends tokens so, whatever they are, and a batch."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[model_name](choices_of(routing)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.uniform_(0.5, 1.5)
        model.get_input_embeddings().weight[:, 0] = 4.0  # of every token: routers see it as a constant
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(0.3 / parameter.std())
                parameter[:, 0] += _favour(routing, len(parameter))
    tokens = torch.randint(0, 64, (4, 8))
    labels = tokens.clone()
    labels[0, :3] = -100  # ranks hold unequal counts
    return model, {"input_ids": tokens, "labels": labels}


def _favour(routing: str, experts: int) -> torch.Tensor:
    """What each expert's logits have beside those of the token, in units of its constant feature."""
    number = torch.arange(experts).float()
    favours = {
        "balanced": torch.zeros(experts),
        "power law": -1.2 * (number + 1).log(),
        ONE: 20.0 * (number == 1),
        "none to a rank": -20.0 * (number >= experts // 2),
    }
    return favours[routing]


@cache
def _single(model_name: str, routing: str) -> Any:
    return run_single(*build(model_name, routing), OPTIMIZERS)


@cache
def _graph(model_name: str, choices: int) -> Graph:
    """Weights do not matter to it."""
    graph = trace(*build(model_name, ROUTINGS[0] if choices > 1 else ONE))
    return with_sinks(graph, over_sinks(graph)) if model_name == "gpt_oss_told" else graph


@cache
def planned(model_name: str, plan_name: str, choices: int, chunks: int) -> tuple[autopar.Plan, Graph, str]:
    """The template, its graph and its program. Raises AutoparError where there is none."""
    asked = PLANS[plan_name]
    world = math.prod(asked.get(name, 1) for name in ("dp", "cp", "tp", "pp"))
    nodes = 2 if "exchange" in asked else 1
    traced = _graph(model_name, choices)
    plan = template_of_graph(traced, autopar.Mesh("cpu", nodes, world // nodes), exchange_chunks=chunks, **asked)
    graph = graph_of(plan, traced)
    return plan, graph, emit(graph, plan)


def faults(case: Case) -> list[str]:
    """Runs the plan on gloo ranks. What is out of tolerance, or not as predicted, one line each."""
    plan, graph, source = planned(case.model, case.plan, choices_of(case.routing), case.chunks)
    if "exchanged=" not in source or f"chunks={case.chunks}" not in f"{source} chunks=1":
        return ["tokens are not exchanged as the template says"]
    model, batch = build(case.model, case.routing)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(plan.mesh.num_devices).run(run_rank, source, state, batch, OPTIMIZERS)
    found = differences(_single(case.model, case.routing), results[0])
    if len({(loss.item(), norm.item()) for loss, _, norm, *_ in results}) > 1:
        found.append("ranks disagree about the loss or the norm")
    return found + wrong_bytes(plan, graph, model, batch, [result[4] for result in results])


def wrong_bytes(
    plan: autopar.Plan, graph: Graph, model: nn.Module, batch: Tensors, counted: list[Mapping[str, int]]
) -> list[str]:
    """Where ranks sent other bytes than the plan foretells for the routing that happens."""
    if len(plan.stages) == 1:
        expected = [(range(plan.mesh.num_devices), bytes_of(graph, plan, model, batch))]
    else:
        with as_routed(graph, model, batch):
            expected = bytes_by_submesh(plan, graph)
    found = []
    for ranks, predicted in expected:
        busiest = max(counted[rank].get("send", 0) for rank in ranks)
        sent = {kind: size for kind, size in counted[ranks.start].items() if size}
        own = {**sent, **({"send": busiest} if busiest else {})}
        if own != predicted:
            found.append(f"rank {ranks.start} sent {own}, expected {predicted}")
    return found


def prove(case: Case) -> tuple[str, str]:
    """ "equal", "no such plan" or "WRONG", and why."""
    try:
        found = faults(case)
    except InternalError as error:
        return "WRONG", str(error)
    except AutoparError as error:
        return "no such plan", str(error)
    except Exception as error:  # goes into the table, and the others are still run
        return "WRONG", f"{type(error).__name__}: {error}"
    return ("WRONG" if found else "equal"), "; ".join(found)


def main() -> int:
    """Proves every case; prints a line each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    parser.add_argument("--plans", nargs="*", default=[*PLANS])
    parser.add_argument("--routings", nargs="*", default=[*ROUTINGS])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--every", type=int, default=1, help="of the cases in their order, one in so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    started, rows = time.monotonic(), dict[Case, tuple[str, str]]()
    every = list(itertools.product(options.models, options.plans, options.chunks, options.routings))
    for model_name, plan_name, chunks, routing in every[options.first :: options.every]:
        case = Case(model_name, plan_name, routing, chunks)
        rows[case] = prove(case)
        outcome, why = rows[case]
        print(f"{case}: {outcome}{f' ({why})' if why else ''}", flush=True)
    if options.output:
        (options.output / "experts.md").write_text(_text(rows, time.monotonic() - started), encoding="utf-8")
    wrong = sum(outcome == "WRONG" for outcome, _ in rows.values())
    print(f"{wrong} wrong of {len(rows)}")
    return int(wrong > 0)


def _text(rows: dict[Case, tuple[str, str]], seconds: float) -> str:
    counts = Counter(outcome for outcome, _ in rows.values())
    facts = {
        "command": " ".join(["python -m tests.equivalence.experts", *sys.argv[1:]]),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "date": date.today().isoformat(),
        "seconds": f"{seconds:.0f}",
        "equal": "loss within 1e-5, each gradient and clipped norm within 1e-4, weights after three SGD steps within "
        "1e-4 and AdamW steps within 1e-3 (relative, float32), the same loss and norm on every rank, bytes of each "
        "collective on the first rank of each stage exactly as predicted, of exchanges as routed",
        "rows": ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())),
    }
    columns = list(dict.fromkeys((case.routing, case.chunks) for case in rows))
    lines = [*(f"{key}: {value}  " for key, value in facts.items()), ""]
    lines += [f"| model | plan | {' | '.join(f'{routing}, {chunks}' for routing, chunks in columns)} |"]
    lines += ["|---" * (len(columns) + 2) + "|"]
    for model, plan in dict.fromkeys((case.model, case.plan) for case in rows):
        cells = [rows.get(Case(model, plan, *column), ("", ""))[0] for column in columns]
        lines.append(f"| {model} | {plan} | {' | '.join(cells)} |")
    lines += ["", "## Why not", ""]
    lines += [f"- {case}, {what}: {' '.join(why.split())[:400]}" for case, (what, why) in rows.items() if why]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(main())
