"""Plans that people write by hand, as constraints on named axes: data, tensor, sequence and context parallel, ZeRO."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, get_args

from autopar.cost.memory import optimizer_of
from autopar.errors import MeshError, PlanError
from autopar.expert_parallel import (
    expert_axes,
    expert_constraints,
    expert_parameters,
    others_on,
    patterns,
    sliced_constraints,
)
from autopar.ir.constraint import Constraint, Context
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh, Mesh, make_axes
from autopar.ir.offload import ACTIVATIONS, BOTH, BUILT, NOT_OFFLOADED, OFFLOADS, OPTIMIZER
from autopar.ir.placement import S, Type, chunk_length
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.ir.structure import batch_inputs
from autopar.ops.window_attention import SINK_ATTENTION
from autopar.positions import attending, attention_nodes, sequence_types
from autopar.zero import KINDS, KINDS_TEXT, copied_blocks, joined, recomputable

DATA = ("dp", "hsdp", "ep_nodes", "ep")
"""The axes that samples are split on: of hierarchical data parallelism, copies of parameters and shards of them; of
expert parallelism, ranks with experts of their own."""


GRADIENTS = SUMS, FACTORS = "sums", "factors"
"""How gradients of parameters meet: all as sums, or those of linear operators as factors where that sends less."""

CONTEXTS = get_args(Context)
"""How attention over positions that are split may run."""


def template_axes(
    mesh: Mesh, dp: int, tp: int, pp: int, hsdp: int = 1, cp: int = 1, ep: int = 1, exchange: str = "flat"
) -> LogicalMesh:
    """The axes dp (outer), cp and tp (inner) of a stage. hsdp: of the ranks of dp, neighbours that are an axis of their
    own; ep: those that share the experts (`expert_axes`). Raises MeshError unless dp × cp × tp × pp is the number of
    devices, and hsdp divides dp."""
    if dp * cp * tp * pp != mesh.num_devices or min(dp, cp, tp, pp) < 1:
        factors = {"dp": dp, **({"cp": cp} if cp != 1 else {}), "tp": tp, "pp": pp}
        raise MeshError(
            f"expected {' × '.join(factors)} = {mesh.num_devices} devices of {mesh}, found "
            f"{' × '.join(map(str, factors.values()))} = {dp * cp * tp * pp}"
        )
    if hsdp < 1 or dp % hsdp:
        raise MeshError(f"expected hsdp as a number of ranks that divides dp={dp}, found {hsdp}")
    inner = hsdp if hsdp < dp else 1  # of all ranks, it is dp itself
    outer = (("dp", dp // inner), ("hsdp", inner)) if ep == 1 else expert_axes(mesh, dp, tp, cp, ep, exchange).sizes
    sizes = {name: size for name, size in (*outer, ("cp", cp), ("tp", tp)) if size > 1}
    return make_axes(tuple(sizes), tuple(sizes.values()))


def template_ranks(mesh: Mesh, pp: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """The first rank of each stage: pp submeshes of neighbouring ranks; interleaved, each has `chunks` stages in turn.

    Raises PlanError for a schedule that is unknown, or has nothing to interleave.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"expected schedule as one of {', '.join(SCHEDULES)}, found {schedule!r}")
    row = SCHEDULES[schedule]
    if row.has_chunks and (not row.allows(chunks) or chunks < 2 or pp < 2):
        some = f"{row.num_chunks} chunks" if row.num_chunks else "at least 2 chunks"
        raise PlanError(
            f'expected {some} a rank and pp > 1 to interleave, found chunks={chunks}, pp={pp}; use schedule="{PLAIN}"'
        )
    firsts = range(0, mesh.num_devices, mesh.num_devices // pp)
    return tuple(row.in_turn(firsts, chunks if row.has_chunks else 1))


def check_hsdp(mesh: Mesh, pp: int, hsdp: int) -> None:
    """That the batches of so many neighbours are equal. Raises PlanError."""
    if hsdp > 1 and pp == 1 and not mesh.is_homogeneous:
        raise PlanError(f"expected devices of one kind, or stages, with hsdp={hsdp}, found {mesh}")


def check_context(mesh: Mesh, cp: int, context: str) -> None:
    """That sequences are split among equal devices, in a way that there is. Raises PlanError."""
    if context not in CONTEXTS:
        raise PlanError(f"expected context as one of {', '.join(CONTEXTS)}, found {context!r}")
    if cp > 1 and not mesh.is_homogeneous:
        raise PlanError(f"expected devices of one kind with cp={cp}, found {mesh}; use cp=1")


def check_gradients(gradients: str, pp: int, is_homogeneous: bool) -> None:
    """That gradients meet in a way that there is; as factors in one stage, of equal devices. Raises PlanError."""
    if gradients not in GRADIENTS:
        raise PlanError(f"expected gradients as one of {', '.join(GRADIENTS)}, found {gradients!r}")
    if gradients == FACTORS and (pp > 1 or not is_homogeneous):
        found = f"pp={pp}" if pp > 1 else "devices of several kinds"
        raise PlanError(
            f'expected one stage on devices of one kind with gradients="factors", found {found}; use "sums"'
        )


def check_offload(offload: str, mode: str, mesh: Mesh, optimizer: str | None) -> None:
    """That it is a word for what is kept on the host, and goes with the other arguments. Raises PlanError."""
    if offload not in OFFLOADS:
        raise PlanError(f"expected offload as one of {', '.join(OFFLOADS)}, found {offload!r}")
    if offload != NOT_OFFLOADED and mode != "train":
        raise PlanError(f'expected mode="train" with offload={offload!r}, found {mode!r}; use offload="none"')
    if offload != NOT_OFFLOADED and not mesh.is_homogeneous:
        raise PlanError(f'expected devices of one kind with offload={offload!r}, found {mesh}; use offload="none"')
    if offload in (OPTIMIZER, BOTH) and not optimizer_of(optimizer).is_elementwise:
        raise PlanError(
            f"expected an optimizer whose update of an element depends on no other with offload={offload!r}, found "
            f'{optimizer!r}; use adamw or the like, or offload="none"'
        )
    if offload not in BUILT:
        raise PlanError(
            f"expected offload as one of {', '.join(BUILT)}, found {offload!r}, for which no program is made yet; use "
            'offload="none", with recompute="full" or zero=3 where memory is short'
        )


def check_split(split: str) -> None:
    """That blocks, or rows, are shared out in a way that there is. Raises PlanError."""
    if split not in ("equal", "speed"):
        raise PlanError(f'expected split as "equal" or "speed", found {split!r}')


def template_recompute(graph: Graph, block_paths: Sequence[str], recompute: str) -> tuple[str, ...]:
    """What is computed again in the backward pass, as in `Plan.recompute`.

    "full": each repeated block, of which only what enters it is kept. "block": of each repeated block the attention
    alone, that is the innermost modules with an attention operator in them, or with a softmax and a product of two
    activations. "selective": of each repeated block the operators that are cheap to compute again for the memory which
    that frees, such as norms and activations. Raises PlanError for another word, or when there is nothing of the kind.
    """
    if recompute not in KINDS:
        raise PlanError(f"expected recompute as {KINDS_TEXT}, found {recompute!r}")
    if recompute == "none":
        return ()
    found = joined(recomputable(graph, block_paths).of_kind(recompute))
    if not found:
        what = {"full": "repeated blocks", "block": "attention operators in repeated blocks"}
        missing = what.get(recompute, "cheap operators in repeated blocks")
        raise PlanError(f"expected a model with {missing} for recompute={recompute!r}, found none")
    return found


def template_copied_out(graph: Graph, repeated: Sequence[str], offload: str) -> tuple[str, ...]:
    """What is copied to the host between the passes, as in `Plan.copied_out`: with "activations" or "both" the repeated
    blocks, but for the last, which the backward pass needs at once. Raises PlanError where there are none."""
    if offload not in (ACTIVATIONS, BOTH):
        return ()
    found = copied_blocks(graph, repeated)
    if not found:
        raise PlanError(f"expected a model with repeated blocks for offload={offload!r}, found none")
    return found


def template_constraints(
    graph: Graph, axes: LogicalMesh, zero: int, sequence_parallel: bool, block_paths: tuple[str, ...],
    batch: Mapping[str, Type], sequence: Mapping[str, Type] | None = None, context: str = "gather",
    sharing: Sequence[str] = (), kept: SomeBlocks | None = None, sliced: str = "", gradients: str = SUMS,
) -> list[Constraint]:  # fmt: skip
    """The constraints of a template on its axes.

    dp: inputs split by sample, and so is all that is made of them (`batch`: the tensors by name) where it can be,
    cheaper or not: small models would rather gather the batch; caches of its sequences, too; parameters used whole,
    stored whole (ZeRO-0) or sharded (1 to 3). hsdp: the same, with parameters sharded on it, and stored whole on dp.
    cp: what has positions is split by them (`sequence`: the tensors by name), and so are results of attention, or by
    heads where `context` says it;
    parameters as on dp. tp: matrices are sharded where a dim divides (Megatron's column and row pairs then cost least),
    parameters stored as used; with sequence parallel, activations between blocks prefer to be split. sharing: the axes
    that share the experts; kept: which results stand for equal ones; sliced: an axis whose ranks have slices of them.
    gradients: how those of parameters meet on dp and hsdp (`GRADIENTS`).
    """
    meeting = ("I",) if gradients == FACTORS else ()
    names = [axis.name for axis in axes]
    num_ranks = math.prod(axis.size for axis in axes if axis.name in DATA)
    sharded = "hsdp" if "hsdp" in names else "dp"

    def given(name: str) -> tuple[str, ...]:
        """Scalars and the like, such as the two ends of edges, are the same on all ranks."""
        shape = graph.tensors[name].shape
        is_split = bool(shape) and (shape[0] >= num_ranks or name in batch_inputs(graph))
        return ("S(0)",) if is_split else ("R", "I")

    found: list[Constraint] = []
    caches = {name for name, item in graph.kept_in_parts.items() if item.kind == "buffer"}
    for data in (name for name in DATA if name in names):
        is_sharded = zero > 0 and data in (sharded, "ep_nodes", "ep")
        stored = ("S",) if is_sharded else ("I", "R")  # R: a frozen parameter has no gradient to keep whole
        whole = [
            Constraint("*", ("R", *meeting), what="used", axis=data, min_dims=2),
            Constraint("*", ("R", "P", *meeting), what="used", axis=data),
            Constraint("*", stored, what="stored", axis=data, soft=is_sharded, zero=zero if is_sharded else None),
        ]
        found += [Constraint(name, given(name), what="input", axis=data) for name in graph.inputs]
        own = expert_parameters(graph, data == sliced) if data == sliced or data in sharing else set[str]()
        own |= caches
        found += others_on(graph, whole, own) if own else whole
        found += [Constraint(name, ("S(0)",), what="stored", axis=data) for name in sorted(caches)]
        found += [Constraint(name, (str(type_),), what="tensor", axis=data, soft=True) for name, type_ in batch.items()]
    if "cp" in names:
        size = next(axis.size for axis in axes if axis.name == "cp")
        found += _context_constraints(graph, size, zero, sequence or {}, context, "cp" in sharing)
    if "tp" in names:
        found += [
            Constraint("*", ("R",), what="input", axis="tp"),
            Constraint("*", ("S",), what="used", axis="tp", min_dims=2, soft=True),
        ]
        if zero == 0:
            found.append(Constraint("*", ("S",), what="stored", axis="tp", min_dims=2, soft=True))
        edge = ("S(1)",) if sequence_parallel else ("I", "R", "P")
        found += [Constraint(path, edge, axis="tp", soft=True) for path in block_paths]
    first = {n for n in graph.tensors if kept is None or kept.representative_tensor(n) == n}
    for axis in sharing:
        found += expert_constraints(graph, axis, first)
    return [*found, *(sliced_constraints(graph, sliced, first) if sliced else ())]


def _context_constraints(
    graph: Graph, size: int, zero: int, sequence: Mapping[str, Type], context: str, shares: bool
) -> list[Constraint]:
    """Those on cp, of so many ranks. Inputs are whole, and cut where they are read: labels are moved by a position
    before. shares: its ranks share the experts."""
    whole = [
        Constraint("*", ("R",), what="used", axis="cp", min_dims=2),
        Constraint("*", ("R", "P"), what="used", axis="cp"),
        Constraint(
            "*", ("S",) if zero else ("I", "R"), what="stored", axis="cp", soft=zero > 0, zero=zero if zero else None
        ),
    ]
    read = {graph.stored_by_tensor[name].name: t for name, t in sequence.items() if name in graph.stored_by_tensor}
    read |= _sinks(graph) if context == "heads" else {}
    experts = expert_parameters(graph) if shares else set[str]()
    found = [Constraint("*", ("R",), what="input", axis="cp"), *_but_for(graph, whole[:2], experts.union(read))]
    found += _but_for(graph, whole[2:], experts)
    found += [Constraint(name, ("R", "P", str(type_)), what="used", axis="cp") for name, type_ in read.items()]
    fused = {one.result for one in attending(graph) if not one.weights}
    types = {**sequence, **(_heads(graph, size) if context == "heads" else {})}
    for name in (name for name in sequence if name not in graph.stored_by_tensor):
        found.append(Constraint(name, (str(types[name]),), what="tensor", axis="cp", soft=name not in fused))
    return found


def _but_for(graph: Graph, rules: Sequence[Constraint], some: Collection[str]) -> list[Constraint]:
    """Rules about all that is stored, for what is not among some."""
    if not some:
        return [*rules]
    names = [item.name for item in graph.stored if item.name not in some]
    return [replace(rule, pattern=pattern) for rule in rules for pattern in patterns(names, sorted(some))]


def _heads(graph: Graph, cp: int) -> dict[str, Type]:
    """Of all attention that can be split by heads, how its results are."""
    found = dict[str, Type]()
    for one in attending(graph):
        shapes = {name: graph.tensors[name].shape for name in (one.result, *one.weights)}
        least = min(len(shape) for shape in shapes.values())
        if least > 2 + bool(one.weights) and one.has_heads and _has_parts(shapes[one.result][-3], cp):
            found.update((name, S(len(shape) - 3)) for name, shape in shapes.items())
    return found


def _sinks(graph: Graph) -> dict[str, Type]:
    """Parameters with a score a head, by name, as attention that is split by heads reads them."""
    scores = {node.operands[3] for node in graph.nodes if node.op == SINK_ATTENTION}
    return {graph.stored_by_tensor[name].name: S(0) for name in scores if name in graph.stored_by_tensor}


def longest_sequence(graph: Graph) -> int:
    """The most queries that one sample has in attention."""
    fused = [graph.tensors[node.operands[0]].shape[-2] for node in attention_nodes(graph)]
    by_hand = [graph.tensors[one.query].shape[one.query_type.dim] for one in attending(graph) if one.weights]
    return max((*fused, *by_hand), default=0)


class SomeBlocks(Protocol):
    """Of which blocks are equal, what is asked here: the tensor of the first that stands for one in another."""

    def representative_tensor(self, name: str) -> str: ...


def positions(graph: Graph, blocks: SomeBlocks, cp: int) -> dict[str, Type]:
    """How positions cut what is made of them, in the first of equal blocks; nothing where they are whole. Raises
    PlanError where they cannot be."""
    if cp == 1:
        return {}
    made = {name: type_ for name, type_ in sequence_types(graph).items() if _is_cut(graph, name, type_, cp)}
    _check_sequences(graph, made, cp)
    return {name: type_ for name, type_ in made.items() if blocks.representative_tensor(name) == name}


def _is_cut(graph: Graph, name: str, type_: Type, cp: int) -> bool:
    return type_.kind == "P" or _has_parts(graph.tensors[name].shape[type_.dim], cp)


def _has_parts(length: int, cp: int) -> bool:
    """Whether none of so many ranks is left without a row."""
    return chunk_length(length, cp, cp - 1) > 0


def _check_sequences(graph: Graph, sequence: Mapping[str, Type], cp: int) -> None:
    """That there is attention which positions can split. Raises PlanError, with node and source line."""
    if any(sequence.get(one.result) == one.result_type for one in attending(graph)):
        return
    nodes = attention_nodes(graph)
    if not nodes:
        raise PlanError(
            f"expected attention with cp={cp} (torch.nn.functional.scaled_dot_product_attention, or a softmax between "
            "two products of activations), found none; use cp=1 with dp or tp."
        )
    longest, node = longest_sequence(graph), nodes[0]
    where = f"{node.name} ({node.op}) at {node.source or 'an unknown line'}"
    if not _has_parts(longest, cp):
        raise PlanError(
            f"expected sequences long enough for cp={cp}, of which each rank gets a part, found {longest} positions at "
            f"most, in {where}; use fewer ranks for cp"
        )
    raise PlanError(
        f"expected attention whose queries can be split with cp={cp}, found none, as in {where}: it is causal over "
        "other keys than queries, or drops of its weights. Give it as many keys as queries, or a mask instead, and an "
        "attention dropout of 0; or use cp=1 with dp or tp."
    )
