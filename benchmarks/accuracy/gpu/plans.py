"""The model and the plan of a measured row, or why `template_plan` cannot express it.

Tracing takes most of the time, so rows share it: a model is traced once, with a batch that all rows' batches divide,
which is cut down to each row's, and with sequences of a length that divides no size of any model, so that each row's
length can be put in its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

import autopar
from autopar.cost import Profile
from autopar.errors import AutoparError
from autopar.ir.graph import Graph, Scope
from autopar.ir.plan import COMPILED, Plan
from autopar.ir.recompute import operator_call
from autopar.microbatch import divided_graph
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile, profile_names
from autopar.rewrites import graph_of
from autopar.trace import trace
from benchmarks.accuracy.gpu import decoder
from benchmarks.accuracy.gpu.rows import NVLINK_DOMAIN, Row, Sizes
from benchmarks.accuracy.gpu.softwares import Software, by_threshold, software_of

OTHER_ATTENTION = r"multi-?(head )?latent|\bMLA\b|sliding window|attention sinks"
UNFUSED = r'"attention-backend":"unfused"|eager attention|flash attention False'
TRACED_LENGTH = 65537  # a prime
MOST_SEQUENCES = 1 << 20  # of a batch that is traced, whose sizes must stay numbers of 64 bits
WIDE = ("fp32", "tf32")  # precisions in which tensors have 32 bits
ANY_MEMORY = 1 << 50  # whether it fits is asked of the prediction, not of the plan
PROFILES = {
    "H100-SXM5-80GB": ("h100",), "H200-SXM5-141GB": ("h200",), "A100-SXM4-80GB": ("a100",),
    "A100-SXM4-40GB": ("a100-40gb", "a100"), "B200-SXM6-180GB": ("b200",), "GB200": ("gb200", "b200"),
    "L40S": ("l40s",), "L4": ("l4",), "V100-SXM2-32GB": ("v100",), "V100-SXM2-16GB": ("v100",), "V100": ("v100",),
    "H100": ("h100",), "H200": ("h200",), "A100": ("a100",), "B200": ("b200",), "B200-SXM-180GB": ("b200",),
    "H100-SXM": ("h100",), "A100-80GB": ("a100",), "A100-40GB": ("a100-40gb", "a100"),
}  # fmt: skip
"""By the rows' names of GPUs, the shipped profiles to take, the first that there is."""
FORMS = r"nvidia|tesla|sxm\d?|hbm\d?e?|nvl72|\d+gb|gpu"
"""Words of a GPU's name that say its form, and not another kind: of PCIe, or of two boards (NVL), are others."""
GIVEN: dict[str, tuple[str, ...]] = {}
"""Profiles of further GPUs, or in the place of shipped ones, by name or path: what --profile says."""


def profile_name(gpu: str) -> str:
    """Raises ValueError where none is shipped for it, nor given."""
    for name in GIVEN.get(gpu) or PROFILES.get(gpu) or own_names(gpu):
        try:
            load_profile(name)
        except AutoparError:
            continue
        return name
    raise ValueError(f"no profile is shipped of {gpu or 'a GPU that is not named'}; give one by --profile {gpu}=FILE")


def own_names(gpu: str) -> tuple[str, ...]:
    """The shipped profile that a row names itself, as profiles do, or as data sheets do: by its form and memory."""
    names = {name for shipped in profile_names() for name in (shipped, *load_profile(shipped).aliases)}
    if gpu.lower() in names:
        return (gpu.lower(),)
    words = re.split(r"[\s_-]+", gpu.lower())
    kinds = [word for word in words if not re.fullmatch(FORMS, word)]
    if len(kinds) != 1:
        return ()
    sized = (f"{kinds[0]}-{word}" for word in words if re.fullmatch(r"\d+gb", word))
    return tuple(name for name in (*sized, kinds[0]) if name in names)


def profiles_of(rows: Iterable[Row]) -> dict[str, Profile]:
    """The shipped profiles of the rows' devices, by name."""
    names = set()
    for gpu in {row.gpu for row in rows}:
        with suppress(ValueError):
            names.add(profile_name(gpu))
    return {name: load_profile(name) for name in sorted(names)}


def reason_against(row: Row, softwares: tuple[Software, ...]) -> str:
    """Why nothing is predicted of a row; empty where something is."""
    if row.unknown:
        return row.unknown
    try:
        profile = load_profile(profile_name(row.gpu))
    except ValueError as error:
        return str(error)
    if row.precision == "fp8" and not any(name.startswith("NT float8") for name in profile.tables):
        return f"fp8: the profile {profile.name} knows no products in float8"
    assert row.sizes is not None  # else it is unknown
    if reason := reason_against_model(row):
        return reason
    if empty_stages(row, software_of(row.framework, softwares)):
        return f"{row.pp} stages: {row.framework} leaves some without a block, which have no gradients, and stops"
    return ""


def reason_against_model(row: Row) -> str:
    """What of its model the decoder of this benchmark does not have, or of its experts `template_plan`."""
    assert row.sizes is not None
    if "lora" in row.other.lower() or re.search(OTHER_ATTENTION, f"{row.other} {row.sizes.notes}", re.IGNORECASE):
        return "multi-latent attention, windows of it, or LoRA: not in the decoder of this benchmark"
    if expert_slices(row) not in (1, row.tp):
        return f"etp={row.etp}: template_plan has the hidden values of experts whole, or split over tp={row.tp}"
    if row.ep > 1 and not row.sizes.num_experts:
        return f"ep={row.ep}: the model has no experts"
    return ""


def expert_slices(row: Row) -> int:
    """Among how many ranks each expert's hidden values are split: not stated, as Megatron-LM has it, over all of tp."""
    assert row.sizes is not None
    return (row.etp or row.tp) if row.sizes.num_experts else 1


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
        is_tied=sizes.is_tied, is_causal=sizes.is_causal, fuses_attention=not re.search(UNFUSED, row.other),
        num_experts=sizes.num_experts, chosen_experts=sizes.chosen_experts, expert_size=sizes.expert_ffn,
        shared_size=sizes.shared_ffn, dense_layers=dense_layers(sizes),
        **{**kind, **software.model},
    )  # fmt: skip


def dense_layers(sizes: Sizes) -> tuple[int, ...]:
    """Those without experts: every other one from the first, where the model's notes say so, or the first ones."""
    if not sizes.num_experts:
        return ()
    if "every other layer is moe" in sizes.notes.lower():
        return tuple(range(0, sizes.layers, 2))
    return tuple(range(sizes.dense_layers))


def alike(rows: Sequence[Row], softwares: tuple[Software, ...]) -> Iterator[list[Row]]:
    """Rows of one model, in the order of their shapes, as many together as one batch can be of a size for."""

    def key(row: Row) -> tuple[str, str, bool]:
        software = software_of(row.framework, softwares)
        return str(traced_as(row, software)), row.precision, software.wraps_layers

    for _, group in groupby(sorted(rows, key=key), key):
        members: list[Row] = []
        for row in sorted(group, key=lambda row: (row.seq, row.global_batch)):
            if members and math.lcm(*(one.global_batch for one in (*members, row))) > MOST_SEQUENCES:
                yield members
                members = []
            members.append(row)
        yield members


def traced_as(row: Row, software: Software) -> decoder.Config:
    """The model, with sequences that stand for those of any length; masks of unfused attention are computed once, which
    they would be at any length."""
    own = config_of(row, software)
    return replace(own, seq_len=TRACED_LENGTH) if own.fuses_attention else own


def traced(members: Sequence[Row], software: Software) -> Graph:
    """The model of these rows, of a batch that all of theirs divide."""
    batch = math.lcm(*(row.global_batch for row in members))
    dtype = None if members[0].precision in WIDE else torch.bfloat16
    whole = trace(*decoder.build(traced_as(members[0], software), batch), mode="train", compute_dtype=dtype)
    whole = with_half_head(whole) if members[0].precision == "fp8" else whole
    return of_whole_layers(whole) if software.wraps_layers else whole


def resized(whole: Graph, members: Sequence[Row], row: Row) -> Graph:
    """The model of all these rows (`traced`) as one of them runs it."""
    batch = math.lcm(*(one.global_batch for one in members))
    return divided_graph(of_length(whole, row.seq), batch // row.global_batch)


def with_half_head(graph: Graph) -> Graph:
    """A model trained in float8, whose head stays in 16 bits, as in all softwares that do so: what it makes is float16
    here, whose products are as fast as bfloat16's, which `predictions.with_float8` has stand for float8."""
    made = {name for node in graph.nodes if node.scope.module == "head" for name in node.results}
    tensors = {
        name: replace(tensor, dtype="float16") if name in made else tensor for name, tensor in graph.tensors.items()
    }
    return replace(graph, tensors=tensors)


def of_whole_layers(graph: Graph) -> Graph:
    """A model whose layers are gathered whole, as FSDP gathers modules that are wrapped: nothing inside of a layer is a
    block of its own, so its parameters come together, one layer ahead."""

    def cut(scope: Scope) -> Scope:
        depth = next((n for n, (path, _) in enumerate(scope.path) if re.fullmatch(r"layers\.\d+", path)), None)
        return scope if depth is None else Scope(scope.path[: depth + 2])

    return replace(graph, nodes=tuple(replace(node, scope=cut(node.scope)) for node in graph.nodes))


def of_length(graph: Graph, seq: int) -> Graph:
    """A graph that was traced with sequences of `TRACED_LENGTH`, of sequences of another one: every size and every
    argument that is a multiple of that length is one of sequences."""

    def scaled(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return value // TRACED_LENGTH * seq if value % TRACED_LENGTH == 0 else value
        return type(value)(map(scaled, value)) if type(value) in (tuple, list) else value

    tensors = {name: replace(tensor, shape=scaled(tensor.shape)) for name, tensor in graph.tensors.items()}
    nodes = tuple(replace(node, args=scaled(node.args), kwargs=scaled(node.kwargs)) for node in graph.nodes)
    return replace(graph, tensors=tensors, nodes=nodes)


def stage_layers(row: Row, software: Software) -> tuple[int, ...] | None:
    """Layers of each stage, where they are not as even as can be."""
    if row.layers is not None or row.pp == 1 or row.vp > 1 or software.cut == "even":
        return row.layers
    if row.sizes and row.sizes.layers < row.pp - 1:
        return None  # template_plan says what is wrong
    stages = stages_of_blocks(row)
    return tuple(_without_gaps([stages[:-1].count(stage) for stage in range(row.pp)]))


def stages_of_blocks(row: Row) -> list[int]:
    """The stage of each layer, and of the head, where they are cut by cumulative cost."""
    sizes = row.sizes
    assert sizes is not None
    attention = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_size * sizes.hidden
    layer = attention + (3 if sizes.is_gated else 2) * sizes.ffn * sizes.hidden
    return by_threshold([*[layer] * sizes.layers, sizes.vocab * sizes.hidden], row.pp)


def empty_stages(row: Row, software: Software) -> bool:
    """Whether stages are left when the loss, the last block, has its stage: at most the one after the head's."""
    if row.pp == 1 or row.vp > 1 or row.layers is not None or software.cut == "even":
        return False
    return stages_of_blocks(row)[-1] + 2 < row.pp


def _without_gaps(counts: list[int]) -> list[int]:
    """Stages in the middle without a layer, where the loss is by itself after the head: they take one of the busiest
    stage before them, of equal ones the last: it has the fewest microbatches in flight."""
    for stage in range(len(counts) - 2, 0, -1):
        if not counts[stage]:
            busiest = max(range(stage), key=lambda number: (counts[number], number))
            counts[busiest], counts[stage] = counts[busiest] - 1, 1
    return counts


def gathered_again(graph: Graph, norms: tuple[str, ...]) -> tuple[str, ...]:
    """What is computed again so that what sequence parallelism gathers after these norms of each layer is not kept:
    the norms, which are small beside the gathers."""
    return tuple(operator_call(node) for node in graph.nodes if node.scope.module.endswith(norms) and "norm" in node.op)


def layers_again(plan: Plan, graph: Graph, counts: tuple[int, ...]) -> tuple[str, ...]:
    """The paths of so many layers of each stage (one number: of all stages), the first ones."""
    stages = len(plan.stages)
    wanted, found = (counts if len(counts) == stages else counts[:1] * stages), list[str]()
    for stage, count in zip(plan.stages, wanted, strict=True):
        modules = (".".join(graph.node_by_name[name].scope.module.split(".")[:2]) for name in stage.nodes)
        found += [path for path in dict.fromkeys(modules) if path.startswith("layers.")][:count]
    return tuple(found)


def near_devices(row: Row) -> int:
    """As many as NVLink joins: of a rack the most that make equal parts of all devices."""
    if row.gpu.upper().startswith("GB"):
        return max(count for count in range(1, NVLINK_DOMAIN + 1) if row.gpus % count == 0)
    return min(row.per_node, row.gpus)


def plan_of(graph: Graph, row: Row, software: Software) -> tuple[Graph, Plan]:
    """The graph of one microbatch, and the row's plan on it. Raises AutoparError where it cannot be expressed."""
    per_node = near_devices(row)
    mesh = autopar.Mesh(profile_name(row.gpu), row.gpus // per_node, per_node)
    is_sharded = row.hsdp > 1 and row.hsdp < row.dp
    plan = template_of_graph(
        graph, mesh, dp=row.dp, tp=row.tp, pp=row.pp, microbatches=row.microbatches, layers=stage_layers(row, software),
        schedule="interleaved" if row.vp > 1 else "1f1b", chunks=max(2, row.vp),
        sequence_parallel=row.sequence_parallel and row.tp > 1, cp=row.cp, context=software.context, ep=row.ep,
        zero=row.zero if row.dp > 1 else 0,
        hsdp=row.hsdp if is_sharded else 1, recompute=row.recompute, optimizer="adamw",
        precision=None if row.precision in WIDE else "bf16", memory_limit=ANY_MEMORY,
        constraints=decoder.constraints(row.tp, row.sequence_parallel, row.tp > 1 and expert_slices(row) > 1),
    )  # fmt: skip
    part = divided_graph(graph_of(plan, graph), row.microbatches)
    if row.again:
        plan = replace(plan, recompute=layers_again(plan, part, row.again))
    if software.regathers and row.sequence_parallel and row.tp > 1 and plan.recompute == ():
        plan = replace(plan, recompute=gathered_again(part, software.regathers))
    return part, replace(plan, runs=COMPILED) if row.is_compiled else plan
