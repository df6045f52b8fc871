"""Plans that people write by hand, as constraints on named axes: data, tensor, sequence and context parallel, ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, get_args

from autopar.errors import MeshError, PlanError
from autopar.expert_parallel import expert_axes, expert_constraints, others_on
from autopar.ir.constraint import Constraint, Context
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import LogicalMesh, Mesh, make_axes
from autopar.ir.placement import S, Type
from autopar.ir.schedule import PLAIN, SCHEDULES
from autopar.ir.structure import batch_inputs
from autopar.microbatch import sequence_types
from autopar.ops.table import operator
from autopar.zero import KINDS, KINDS_TEXT, joined, recomputable

DATA = ("dp", "hsdp", "ep_nodes", "ep")
"""The axes that samples are split on: of hierarchical data parallelism, copies of parameters and shards of them; of
expert parallelism, ranks with experts of their own."""


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


def check_hsdp(mesh: Mesh, pp: int, hsdp: int, zero: int) -> None:
    """That there is something to shard among so many ranks, whose batches are equal. Raises PlanError."""
    if hsdp > 1 and pp == 1 and not mesh.is_homogeneous:
        raise PlanError(f"expected devices of one kind, or stages, with hsdp={hsdp}, found {mesh}")
    if hsdp > 1 and zero == 0:
        raise PlanError(f"expected zero as 1, 2 or 3 with hsdp={hsdp}, which says among how many ranks, found 0")


def check_context(mesh: Mesh, cp: int, context: str) -> None:
    """That sequences are split among equal devices, in a way that there is. Raises PlanError."""
    if context not in CONTEXTS:
        raise PlanError(f"expected context as one of {', '.join(CONTEXTS)}, found {context!r}")
    if cp > 1 and not mesh.is_homogeneous:
        raise PlanError(f"expected devices of one kind with cp={cp}, found {mesh}; use cp=1")


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


def template_constraints(
    graph: Graph, axes: LogicalMesh, zero: int, sequence_parallel: bool, block_paths: tuple[str, ...],
    batch: Mapping[str, Type], sequence: Mapping[str, Type] | None = None, context: str = "gather",
    sharing: Sequence[str] = (), kept: SomeBlocks | None = None,
) -> list[Constraint]:  # fmt: skip
    """The constraints of a template on its axes.

    dp: inputs split by sample, and so is all that is made of them (`batch`: the tensors by name) where it can be,
    cheaper or not: small models would rather gather the batch; parameters used whole, stored whole (ZeRO-0) or sharded
    (1 to 3). hsdp: the same, with parameters sharded on it, and stored whole on dp. cp: what has positions is split by
    them (`sequence`: the tensors by name), and so are results of attention, or by heads where `context` says it;
    parameters as on dp. tp: matrices are sharded where a dim divides (Megatron's column and row pairs then cost least),
    parameters stored as used; with sequence parallel, activations between blocks prefer to be split. sharing: the axes
    that share the experts; kept: which results stand for equal ones.
    """
    names = [axis.name for axis in axes]
    num_ranks = math.prod(axis.size for axis in axes if axis.name in DATA)
    sharded = "hsdp" if "hsdp" in names else "dp"

    def given(name: str) -> tuple[str, ...]:
        """Scalars and the like, such as the two ends of edges, are the same on all ranks."""
        shape = graph.tensors[name].shape
        is_split = bool(shape) and (shape[0] >= num_ranks or name in batch_inputs(graph))
        return ("S(0)",) if is_split else ("R", "I")

    found: list[Constraint] = []
    for data in (name for name in DATA if name in names):
        is_sharded = zero > 0 and data in (sharded, "ep_nodes", "ep")
        stored = ("S",) if is_sharded else ("I", "R")  # R: a frozen parameter has no gradient to keep whole
        whole = [
            Constraint("*", ("R",), what="used", axis=data, min_dims=2),
            Constraint("*", ("R", "P"), what="used", axis=data),
            Constraint("*", stored, what="stored", axis=data, soft=is_sharded, zero=zero if is_sharded else None),
        ]
        found += [Constraint(name, given(name), what="input", axis=data) for name in graph.inputs]
        found += others_on(graph, whole) if data in sharing else whole
        found += [Constraint(name, (str(type_),), what="tensor", axis=data, soft=True) for name, type_ in batch.items()]
    if "cp" in names:
        found += _context_constraints(graph, zero, sequence or {}, context, "cp" in sharing)
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
    return found


def _context_constraints(
    graph: Graph, zero: int, sequence: Mapping[str, Type], context: str, shares: bool
) -> list[Constraint]:
    """Those on cp. Inputs are whole, and cut where they are read: labels are moved by a position before. shares: its
    ranks share the experts."""
    whole = [
        Constraint("*", ("R",), what="used", axis="cp", min_dims=2),
        Constraint("*", ("R", "P"), what="used", axis="cp"),
        Constraint(
            "*", ("S",) if zero else ("I", "R"), what="stored", axis="cp", soft=zero > 0, zero=zero if zero else None
        ),
    ]
    found = [Constraint("*", ("R",), what="input", axis="cp"), *(others_on(graph, whole) if shares else whole)]
    attending = {node.results[0] for node in attention_nodes(graph)}
    for name, type_ in sequence.items():
        is_split = name in attending
        dim = S(len(graph.tensors[name].shape) - 3) if is_split and context == "heads" else type_
        found.append(Constraint(name, (str(dim),), what="tensor", axis="cp", soft=not is_split))
    return found


def longest_sequence(graph: Graph) -> int:
    """The most queries that one sample has in an attention operator."""
    return max((graph.tensors[node.operands[0]].shape[-2] for node in attention_nodes(graph)), default=0)


def attention_nodes(graph: Graph) -> list[Node]:
    """The operators of a graph that attend."""
    return [node for node in graph.nodes if operator(node.op).work.family == "attention"]


class SomeBlocks(Protocol):
    """Of which blocks are equal, what is asked here: the tensor of the first that stands for one in another."""

    def representative_tensor(self, name: str) -> str: ...


def positions(graph: Graph, blocks: SomeBlocks, cp: int) -> dict[str, Type]:
    """How positions cut what is made of them, in the first of equal blocks; nothing where they are whole. Raises
    PlanError where they cannot be."""
    if cp == 1:
        return {}
    made = sequence_types(graph, {node.name for node in attention_nodes(graph)})
    _check_sequences(graph, made, cp)
    return {name: type_ for name, type_ in made.items() if blocks.representative_tensor(name) == name}


def _check_sequences(graph: Graph, sequence: Mapping[str, Type], cp: int) -> None:
    """That there is attention, all of it over positions of inputs. Raises PlanError, with node and source line."""
    nodes = attention_nodes(graph)
    if not nodes:
        raise PlanError(
            f"expected attention operators (torch.nn.functional.scaled_dot_product_attention) with cp={cp}, found "
            "none; with dropout of its weights, attention is several operators. Use an attention dropout of 0, and of "
            'Hugging Face\'s models attn_implementation="sdpa"; or cp=1 with dp or tp.'
        )
    for node in nodes:
        own = sequence.get(node.results[0])
        if own is None or own.kind != "S":
            raise PlanError(
                f"expected attention over positions of an input with cp={cp}, found queries that do not follow dim 1 "
                f"of an input in {node.name} ({node.op}) at {node.source or 'an unknown line'}. Give forward its "
                "sequence as dim 1 of an input, or use cp=1 with dp or tp."
            )
