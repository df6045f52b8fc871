"""Models, meshes and plans whose figures and sources are frozen: plans by template and constraint, none by search.

A case is named `model | mesh | plan`. Its plan is a template's options, one of the other ways in `PLANS`, a file of
plans/ ("file NAME"), or one of `tests.equivalence.pipelines` (model "staged": model, plan, schedule).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from autopar import Constraint, Plan
from autopar.cost.files import profiles_folder
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh, make_axes
from autopar.pipeline import template_of_graph
from autopar.planning import Place, divided
from autopar.profiler import load_profile
from autopar.request import Request, SearchBudget
from autopar.rewrites import graph_of
from autopar.trace import find_blocks, trace
from models import bert, dit, dlrm, gpt, inception, llama, llama_lora, lstm, mlp, moe, two_towers, unet, wide_resnet
from tests.equivalence import pipelines, transformers_zoo, zoo

FILES = Path(__file__).with_name("plans")
#: what the shipped profiles of these devices said when the figures were frozen: what they say now may change
PROFILES = {name: str(Path(__file__).with_name("profiles") / f"{name}.json") for name in ("a100", "h100", "v100")}
Options = Mapping[str, Any]


class Case(NamedTuple):
    """What is planned for what, and how; texts that are keys of the tables below."""

    model: str
    mesh: str
    plan: str

    @property
    def name(self) -> str:
        """As the file of figures has it."""
        return " | ".join(self)


# Models ----------------------------------------


def _own(module: Any, dtype: torch.dtype | None = None, **sizes: Any) -> Callable[[], Any]:
    """One of models/, on the meta device."""

    def build() -> tuple[nn.Module, Any]:
        config = module.Config(**sizes)
        with torch.device("meta"):
            model = module.build(config)
        return model if dtype is None else model.to(dtype), module.example_inputs(config)

    return build


def _language_model(config: transformers.PretrainedConfig, batch: int, length: int) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}


def _hf_gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(use_cache=False, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)
    return _language_model(config, 32, 1024)


def _hf_llama() -> tuple[nn.Module, Any]:
    """Llama 3 8B in its sizes, but for its depth."""
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=500_000.0, use_cache=False,
    )  # fmt: skip
    return _language_model(config, 16, 4096)


_WIDE = {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "seq_len": 1024, "vocab_size": 32_000}
MODELS: dict[str, Callable[[], Any]] = {
    "mlp": _own(mlp),
    "gpt": _own(gpt),
    "gpt, tied, dropout": _own(gpt, num_layers=4, tie_head=True, dropout=0.1),
    "gpt, wide": _own(gpt, **_WIDE, batch_size=64),
    "gpt 1.3b, float16": _own(
        gpt, torch.float16, num_layers=24, hidden_size=2048, num_heads=16, seq_len=1024, vocab_size=51_200,
        batch_size=128,
    ),
    "llama": _own(llama),
    "llama, lora": _own(llama_lora),
    "bert": _own(bert),
    "moe": _own(moe),
    "dit": _own(dit),
    "dlrm": _own(dlrm),
    "lstm": _own(lstm),
    "unet": _own(unet),
    "wide_resnet": _own(wide_resnet),
    "inception": _own(inception),
    "two_towers": _own(two_towers),
    "hf_gpt2, 124m": _hf_gpt2,
    "hf_llama, 8b of 4 layers": _hf_llama,
    **{name: partial(zoo.build, name) for name in ("hf_gpt2", "hf_llama", "hf_bert")},
    **transformers_zoo.CASES,
}  # fmt: skip


@cache
def graph(model: str, precision: str | None = None, mode: str = "train") -> Graph:
    """The model's graph on its batch."""
    built, batch = MODELS[model]()
    return trace(built, batch, mode=mode, compute_dtype=torch.bfloat16 if precision == "bf16" else None)


# Meshes ----------------------------------------


@cache
def slow_profile() -> str:
    """The file of a CPU of half the speed of the shipped one."""
    data = json.loads((profiles_folder() / "cpu.json").read_text())
    facts = data["facts"]
    facts["peak_flops"] = {dtype: rate / 2 for dtype, rate in facts["peak_flops"].items()}
    facts["memory_bandwidth"] /= 2
    path = Path(tempfile.mkdtemp(prefix="autopar-frozen-")) / "slow.json"
    path.write_text(json.dumps(data))
    return str(path)


MESHES: dict[str, Callable[[], Mesh]] = {
    "h100 1x1": lambda: Mesh(PROFILES["h100"]),
    "h100 1x4": lambda: Mesh(PROFILES["h100"], devices_per_node=4),
    "h100 2x2": lambda: Mesh(PROFILES["h100"], nodes=2, devices_per_node=2),
    "h100 1x8": lambda: Mesh(PROFILES["h100"], devices_per_node=8),
    "h100 8x8": lambda: Mesh(PROFILES["h100"], nodes=8, devices_per_node=8),
    "v100 1x4": lambda: Mesh(PROFILES["v100"], devices_per_node=4),
    "v100 2x8": lambda: Mesh(PROFILES["v100"], nodes=2, devices_per_node=8),
    "cpu 1x2": lambda: Mesh("cpu", devices_per_node=2),
    "cpu 1x4": lambda: Mesh("cpu", devices_per_node=4),
    "a100 1x8, v100 1x8": lambda: Mesh([(PROFILES["a100"], 1, 8), (PROFILES["v100"], 1, 8)]),
    "cpu 1x2, slow cpu 1x2": lambda: Mesh([("cpu", 1, 2), (slow_profile(), 1, 2)]),
}


# Plans ----------------------------------------


def _three_axes(whole: Graph, mesh: Mesh, *, microbatches: int = 1, recompute: tuple[str, ...] = ()) -> Plan:
    """Samples on d0, Megatron's pairs on d1, parameters stored in shards on d2, which samples are split on, too."""
    rules = [
        *(Constraint("*", ("S(0)",), what="input", axis=axis) for axis in ("d0", "d2")),
        Constraint("*", ("R",), what="used", axis="d0"),
        Constraint("*", ("S",), what="used", axis="d1", min_dims=2, soft=True),
        Constraint("*", ("R",), what="used", axis="d2"),
        Constraint("*", ("S",), what="stored", axis="d2", soft=True, zero=3),
    ]
    request = Request(mesh, "train", "adamw", None, tuple(rules), SearchBudget(30.0, gap=0.0), None, recompute)
    part = divided(whole, find_blocks(whole), microbatches)
    place = Place(part, make_axes(("d0", "d1", "d2"), (2, 2, 2)), request, load_profile(mesh.profile))
    return part.with_traffic(place.fit(30.0))


def _template(whole: Graph, mesh: Mesh, **options: Any) -> Plan:
    return template_of_graph(whole, mesh, **options)


PLANS: dict[str, tuple[Callable[..., Plan], Options]] = {
    "three axes": (_three_axes, {}),
    "three axes, 2 microbatches": (_three_axes, {"microbatches": 2}),
    "three axes, recomputed": (_three_axes, {"recompute": ("layers.0", "layers.1")}),
}


def _options(text: str) -> Options:
    """Of "dp=2, zero=3": what to ask a template for."""
    pairs = (pair.split("=") for pair in text.split(", ") if pair)
    return {key: json.loads(value) if value.isdigit() or value == "true" else value for key, value in pairs}


def made(case: Case) -> tuple[Graph, Plan]:
    """The graph and the plan of a case. Raises AutoparError where there is no such plan."""
    if case.model == "staged":
        name, plan, schedule = case.plan.split(", ")
        return pipelines.graph(pipelines.ALL_PLANS[plan].variant(name, schedule)), pipelines.plan(name, plan, schedule)
    if case.plan.startswith("file "):
        plan = replace(Plan.load(FILES / f"{case.plan.removeprefix('file ')}.json"), mesh=MESHES[case.mesh]())
        return graph_of(plan, graph(case.model)), plan
    make, options = PLANS.get(case.plan) or (_template, _options(case.plan))
    whole = graph(case.model, options.get("precision"), options.get("mode", "train"))
    return whole, make(whole, MESHES[case.mesh](), **options)


_LISTED = """
mlp | h100 1x1 |
mlp | h100 1x4 | dp=4
mlp | h100 2x2 | dp=2, tp=2, zero=3
mlp | cpu 1x4 | tp=4
mlp | cpu 1x4 | dp=4, optimizer=sgd, microbatches=4, zero=2
mlp | cpu 1x2, slow cpu 1x2 | dp=4, split=speed
mlp | cpu 1x2, slow cpu 1x2 | dp=4, split=equal
mlp | h100 2x2 | file mlp_stages
gpt | h100 2x2 | file gpt_merged
gpt | h100 1x4 | dp=4
gpt | h100 1x4 | dp=4, zero=1
gpt | h100 1x4 | dp=4, zero=2, microbatches=2
gpt | h100 1x4 | dp=4, zero=3
gpt | h100 1x4 | tp=4
gpt | h100 2x2 | dp=2, tp=2, sequence_parallel=true
gpt | h100 2x2 | dp=2, tp=2, zero=3, microbatches=4, recompute=full
gpt | h100 1x4 | dp=2, tp=2, recompute=block, precision=bf16
gpt | h100 1x4 | dp=2, tp=2, mode=inference
gpt | h100 1x8 | three axes
gpt | h100 1x8 | three axes, 2 microbatches
gpt | h100 1x8 | three axes, recomputed
gpt | v100 1x4 | dp=2, tp=2, zero=1
gpt | cpu 1x4 | dp=2, tp=2, zero=3
gpt | cpu 1x4 | dp=2, pp=2, microbatches=4
gpt | cpu 1x2, slow cpu 1x2 | dp=4, split=speed, zero=3
gpt | cpu 1x2, slow cpu 1x2 | dp=2, tp=2, split=speed
gpt, tied, dropout | cpu 1x4 | dp=2, pp=2, microbatches=4, schedule=gpipe
gpt, tied, dropout | cpu 1x4 | pp=2, tp=2, microbatches=4, schedule=interleaved, sequence_parallel=true
gpt, tied, dropout | h100 2x2 | dp=2, pp=2, zero=3, microbatches=4, schedule=zero_bubble
gpt, tied, dropout | h100 2x2 | dp=2, pp=2, zero=1, microbatches=4, recompute=full, precision=bf16
gpt, tied, dropout | v100 1x4 | dp=4, zero=3, recompute=block
gpt, tied, dropout | cpu 1x2, slow cpu 1x2 | pp=2, dp=2, microbatches=4, split=speed
gpt, tied, dropout | cpu 1x2, slow cpu 1x2 | pp=4, microbatches=8, split=equal
gpt, wide | h100 8x8 | dp=64, zero=3
gpt, wide | h100 8x8 | dp=8, tp=8, zero=1, sequence_parallel=true
gpt, wide | h100 8x8 | dp=2, tp=8, pp=4, microbatches=8
gpt, wide | h100 8x8 | dp=8, tp=4, pp=2, microbatches=8, schedule=interleaved, zero=1, recompute=full
gpt, wide | v100 2x8 | dp=2, tp=8, zero=3, recompute=full, precision=bf16
gpt, wide | v100 2x8 | dp=2, tp=4, pp=2, microbatches=16, schedule=zero_bubble, precision=bf16
gpt 1.3b, float16 | a100 1x8, v100 1x8 | dp=2, tp=4, pp=2, microbatches=16, optimizer=adamw_master, recompute=full
gpt 1.3b, float16 | a100 1x8, v100 1x8 | dp=16, zero=1, microbatches=2, optimizer=adamw_master, recompute=full
llama | h100 2x2 | dp=2, tp=2, zero=2, microbatches=2
llama, lora | h100 1x4 | dp=2, tp=2
llama, lora | cpu 1x4 | dp=4, zero=3
moe | h100 1x4 | dp=4, zero=1
moe | cpu 1x4 | dp=2, tp=2, recompute=full
bert | v100 1x4 | dp=4, zero=2, optimizer=lion
bert | cpu 1x4 | dp=2, tp=2, optimizer=adafactor
dlrm | h100 1x4 | dp=2, tp=2
dlrm | cpu 1x4 | dp=4, zero=3
unet | h100 1x4 | dp=4
unet | cpu 1x4 | dp=2, tp=2
wide_resnet | v100 1x4 | dp=4, zero=3
wide_resnet | cpu 1x4 | dp=2, tp=2
two_towers | cpu 1x4 | dp=2, tp=2
two_towers | h100 1x4 | file two_towers_stages
hf_gpt2 | h100 1x4 | dp=4, zero=3, recompute=full
hf_gpt2 | cpu 1x4 | dp=2, tp=2, microbatches=2
hf_mixtral | h100 1x4 | dp=4, zero=1
hf_gemma2 | v100 1x4 | tp=4
hf_gpt2, 124m | h100 8x8 | dp=32, tp=2, zero=3
hf_gpt2, 124m | h100 8x8 | dp=8, tp=4, pp=2, microbatches=4, schedule=zero_bubble, precision=bf16
hf_gpt2, 124m | v100 2x8 | dp=4, tp=4, recompute=block
hf_llama, 8b of 4 layers | h100 8x8 | dp=8, tp=8, zero=3, sequence_parallel=true, recompute=full
hf_llama, 8b of 4 layers | v100 2x8 | tp=8, pp=2, microbatches=16
staged | | gpt, unequal_stages_dp, 1f1b
staged | | gpt, submeshes_1_3_tied, gpipe
staged | | gpt, submeshes_dp_tp, interleaved
staged | | gpt, submeshes_1_2_1, zero_bubble
staged | | llama, submeshes_3_1, zero_bubble
staged | | hf_t5, pp_tp, 1f1b
staged | | moe, pp_recompute, interleaved
"""
CASES = tuple(Case(*(part.strip() for part in line.split("|"))) for line in _LISTED.strip().splitlines())
