"""The model and the plan of a measured row, or why `template_plan` cannot express it.

Tracing takes most of the time, so rows share it: a model of one sequence length is traced once, with a batch that all
rows' batches divide, and cut down to each row's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

import autopar
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.accuracy.gpu import decoder
from benchmarks.accuracy.gpu.rows import NVLINK_DOMAIN, Row
from benchmarks.accuracy.gpu.softwares import Software, software_of

ANY_MEMORY = 1 << 50  # whether it fits is asked of the prediction, not of the plan
PROFILES = {
    "H100-SXM5-80GB": ("h100",), "H200-SXM5-141GB": ("h200",), "A100-SXM4-80GB": ("a100",),
    "A100-SXM4-40GB": ("a100-40gb", "a100"), "B200-SXM6-180GB": ("b200",), "GB200": ("gb200", "b200"),
    "L40S": ("l40s",), "L4": ("l4",), "V100-SXM2-32GB": ("v100",), "V100-SXM2-16GB": ("v100",), "V100": ("v100",),
    "H100": ("h100",), "H200": ("h200",), "A100": ("a100",), "B200": ("b200",), "B200-SXM-180GB": ("b200",),
    "H100-SXM": ("h100",), "A100-80GB": ("a100",), "A100-40GB": ("a100-40gb", "a100"),
}  # fmt: skip
"""By the rows' names of GPUs, the shipped profiles to take, the first that there is."""


def profile_name(gpu: str) -> str:
    """Raises ValueError where none is shipped for it."""
    for name in PROFILES.get(gpu, ()):
        try:
            load_profile(name)
        except AutoparError:
            continue
        return name
    raise ValueError(f"no profile is shipped of {gpu}")


def reason_against(row: Row, softwares: tuple[Software, ...]) -> str:
    """Why nothing is predicted of a row; empty where something is."""
    if row.unknown:
        return row.unknown
    try:
        profile_name(row.gpu)
    except ValueError as error:
        return str(error)
    assert row.sizes is not None  # else it is unknown
    if row.sizes.num_experts:
        return "experts: routing and grouped products are not in the decoder of this benchmark"
    if row.cp > 1:
        return "cp: template_plan has no context parallelism"
    if row.ep > 1:
        return "ep: template_plan has no expert parallelism"
    if "multi-latent" in row.other or "lora" in row.other.lower():
        return "multi-latent attention or LoRA: not in the decoder of this benchmark"
    return ""


def config_of(row: Row, software: Software) -> decoder.Config:
    """The model as its software computes it."""
    sizes = row.sizes
    assert sizes is not None
    kind = {"is_gated": True, "norm": "rms", "positions": "rotary"} if sizes.is_gated else {"has_bias": True}
    if row.model.startswith("mpt"):
        kind = {"has_bias": False, "positions": "learned"}
    if "squared relu" in sizes.notes.lower():
        kind = {"activation": "squared_relu", "positions": "rotary"}
    return decoder.Config(
        seq_len=row.seq, num_layers=sizes.layers, hidden_size=sizes.hidden, num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads, head_size=sizes.head_size, mlp_size=sizes.ffn, vocab_size=sizes.vocab,
        is_tied=sizes.is_tied, is_causal=sizes.is_causal, fuses_attention="unfused" not in row.other and "eager attention" not in row.other,
        **{**kind, **software.model},
    )  # fmt: skip


def graphs(rows: Sequence[Row], softwares: tuple[Software, ...]) -> Iterator[tuple[Graph, list[Row]]]:
    """Traced models, each with the rows that are of it."""

    def key(row: Row) -> tuple[str, str]:
        return str(config_of(row, software_of(row.framework, softwares))), row.precision

    for _, group in groupby(sorted(rows, key=key), key):
        members = list(group)
        config = config_of(members[0], software_of(members[0].framework, softwares))
        batch = math.lcm(*(row.global_batch for row in members))
        dtype = None if members[0].precision == "fp32" else torch.bfloat16
        whole = trace(*decoder.build(config, batch), mode="train", compute_dtype=dtype)
        for size, same in groupby(sorted(members, key=lambda row: row.global_batch), lambda row: row.global_batch):
            yield divided_graph(whole, batch // size), list(same)


def plan_of(graph: Graph, row: Row) -> tuple[Graph, Plan]:
    """The graph of one microbatch, and the row's plan on it. Raises AutoparError where it cannot be expressed."""
    per_node = NVLINK_DOMAIN if row.gpu.startswith("GB") else row.per_node
    per_node = min(per_node, row.gpus)
    mesh = autopar.Mesh(profile_name(row.gpu), row.gpus // per_node, per_node)
    is_sharded = row.hsdp > 1 and row.hsdp < row.dp
    plan = template_of_graph(
        graph, mesh, dp=row.dp, tp=row.tp, pp=row.pp, microbatches=row.microbatches, layers=row.layers,
        schedule="interleaved" if row.vp > 1 else "1f1b", chunks=max(2, row.vp),
        sequence_parallel=row.sequence_parallel and row.tp > 1, zero=row.zero if row.dp > 1 else 0,
        hsdp=row.hsdp if is_sharded else 1, recompute=row.recompute, optimizer="adamw",
        precision=None if row.precision == "fp32" else "bf16", memory_limit=ANY_MEMORY,
        constraints=decoder.constraints(row.tp, row.sequence_parallel),
    )  # fmt: skip
    return divided_graph(graph, row.microbatches), plan
