"""Routed experts as one operator: every token goes through the experts that its router chose, each a small network.

    y[t] = Σ_k weights[t, k] · expert(ids[t, k])(x[t])
    expert(e)(x) = f(x @ up[e] + up_bias[e]) @ down[e] + down_bias[e]

f is elementwise, or of two parts of the hidden values, which are halves, or even and odd columns
(`runtime.lowering.activations`). There, `up` has a dim for the parts, so that the hidden values can be split.

Models write this as sort, gather, grouped products and the way back (see `trace.routing`). Sorted rows belong to no
slice of the tokens, so those operators have no rules one by one; together they treat each token by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autopar.errors import PlanError
from autopar.ir.exchange_table import FLAT, ExchangeTable
from autopar.ir.graph import BY_LOAD, EXPECTED, Graph, Node
from autopar.ir.placement import Axis, Placement, R, S, Shape, local_shape
from autopar.ir.plan import NodePlan
from autopar.ir.routing import BALANCED, HISTOGRAM, Routing
from autopar.ir.slice_table import DATA, SLICE_WAYS, TENSOR
from autopar.ops import saved, work
from autopar.ops.call import Call, argument
from autopar.ops.inner import Inner, Sent, split_by
from autopar.ops.loads import busiest
from autopar.ops.local import LocalCall, tuple_of
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.operator import Operator
from autopar.ops.replicas import replicas_error, replicas_of, sent_for_replicas
from autopar.ops.sliced import sent_for_slices, slice_table_of, sliced_error, sliced_over, sliced_rule
from autopar.ops.workspace import RuntimeMemory, Sizes
from autopar.runtime.lowering.activations import activated

ROUTED_EXPERTS = "autopar.routed_experts.default"
POSITIONS = "expert_positions"
"""What a constant is named that says where each expert is placed."""

_LIBRARY: Any = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "routed_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, str activation, bool gated, "
    "int num_experts, Tensor? up_bias=None, Tensor? down_bias=None, *, bool paired=False, int chunks=1, "
    "str exchange='', str slices='', str routing='', int replicas=0) -> Tensor"
)


def _routed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    activation: str, gated: bool, num_experts: int, up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None, *, paired: bool = False, chunks: int = 1, exchange: str = "",
    slices: str = "", routing: str = "", replicas: int = 0,
) -> torch.Tensor:  # fmt: skip
    """The formula above, a matrix for each token and choice: simple, and large; programs call the runtime's. Numbers
    that are no expert's add nothing.

    chunks, exchange: how ranks exchange tokens, the same at any load, or by it (`ExchangeTable.text`). slices: what
    travels where they are sliced (`SliceTable.text`). routing: how tokens are expected to choose, as `Routing.text` has
    it. replicas: how many experts, those with most rows, every rank computes where tokens are exchanged. None of them
    changes what is computed.
    """
    is_expert, ids = ids < num_experts, ids.clamp(max=num_experts - 1)
    hidden = torch.einsum("td,tkdn->tkn", x, up.flatten(2)[ids])
    hidden = hidden if up_bias is None else hidden + up_bias.flatten(1)[ids]
    hidden = activated(hidden.flatten(0, 1), activation, gated, paired).view(*ids.shape, -1)
    made = torch.einsum("tkh,tkhm->tkm", hidden, down[ids])
    made = made if down_bias is None else made + down_bias[ids]
    return torch.where(is_expert.unsqueeze(-1), made * weights.unsqueeze(-1), 0).sum(1)


_LIBRARY.impl("routed_experts", _routed_experts, "CompositeImplicitAutograd")


def routed_experts(call: Call) -> list[AxisRule]:
    """Tokens; experts, whose ranks each add what their own experts make; both, where choices are exchanged; hidden
    values; both tokens and these (`sliced`); columns of the result."""
    hidden = _hidden_letters(call)
    operands = ["t D", "t K", "t K", f"e D {hidden}", f"e {'h' if 'h' in hidden else 'H'} m"]
    operands += [f"e {hidden}"] * call.has_tensor("up_bias") + ["e m"] * call.has_tensor("down_bias")
    words = [word + "R" * call.has_tensor("up_bias") for word in ("RRPRR", "RRRRP")]
    words = [words[0] + "R", words[1] + "P"] if call.has_tensor("down_bias") else words
    added = (len(operands) - 1,) if call.has_tensor("down_bias") else ()
    text = f"{', '.join(operands)} -> t m"
    rules = einsum_rules(text, call.operand_shapes, call.result_shapes, " ".join(words), added)
    return [*rules, *_exchange(call), *sliced_rule(call)]


def _hidden_letters(call: Call) -> str:
    """How the hidden values lie in `up`: "h" may be split, and is the same in `down`."""
    if not call.arguments["gated"]:
        return "h"
    if len(call.shape(3)) == 3:
        return "N"
    return "h G" if call.arguments["paired"] else "G h"


def _exchange(call: Call) -> list[AxisRule]:
    """Every rank has its tokens and its experts. Tokens without a gradient get none back: then experts have none."""
    count = len(call.node.operands)
    wanted = {call.tensor(position).differentiable for position in range(count) if position not in (1, 2)}
    is_uniform = call.tensor(0).differentiable or not any(wanted)
    long_enough = call.shape(0)[0] > 1 and call.shape(3)[0] > 1
    return [AxisRule((S(0),) * count, (S(0),))] if long_enough and is_uniform else []


# Exchanges ----------------------------------------


Names = tuple[str, ...]


class Exchanged(NamedTuple):
    """Rows, one for each choice of a token: those that a rank has for the experts, that the busiest rank computes in
    the mean, and that it does at the 99th percentile; home: those of each in the mean that stay on the rank, for
    replicas of experts."""

    sent: int
    mean: int
    most: int
    home: int = 0


def exchanged_rows(
    tokens: int, choices: int, num_experts: int, ranks: int, routing: str = "", replicas: int = 0
) -> Exchanged:
    """What ranks exchange that have so many tokens each, and share the experts. routing: as an operator says it;
    replicas: of so many experts."""
    load = busiest(Routing.parse(routing), tokens * ranks, choices, num_experts, ranks, replicas)
    return Exchanged(tokens * choices, math.ceil(load.mean), load.most, math.floor(load.home / max(1, ranks)))


def exchanged_over(operands: tuple[Placement, ...]) -> list[int]:
    """The axes, by position, over which tokens are exchanged."""
    return [axis for axis in split_by(operands[3], lambda type_: type_ == S(0)) if operands[0][axis] == S(0)]


def table_of(node: Node) -> ExchangeTable | None:
    """How an operator exchanges tokens by load, where it does. Raises PlanError."""
    text = dict(node.kwargs).get(BY_LOAD, "")
    return ExchangeTable.parse(text) if text else None


def _sent_over(operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> list[int]:
    """The axes, by position, over which something is sent."""
    return [position for position in exchanged_over(operands) if axes[position].size > 1]


def are_neighbours(axes: Sequence[Axis]) -> bool:
    """Whether the ranks of several axes, the outer one first, follow each other as those of one would."""
    return all(outer.stride == inner.stride * inner.size for outer, inner in itertools.pairwise(axes))


def joined_axes(graph: Graph, placements: Mapping[str, NodePlan], axes: tuple[Axis, ...]) -> tuple[Names, ...]:
    """The names of the axes over which operators may exchange as over one."""
    found = dict[Names, None]()
    for node in graph.nodes:
        if node.op == ROUTED_EXPERTS and table_of(node) is not None:
            over = _sent_over(placements[node.name].operands, axes)
            found.update({tuple(axes[position].name for position in over): None} if len(over) > 1 else {})
    return tuple(found)


def place_table_bytes(layers: Iterable[Node], placements: Mapping[str, NodePlan], axes: tuple[Axis, ...]) -> int:
    """What the runtime keeps to tell where each expert is, of all layers that look for them alike: an int64 for each
    expert and one more; where ranks are one after the other in two orders by load, for each."""
    found = dict[tuple[object, ...], int]()
    for node in layers:
        operands, experts = placements[node.name].operands, int(argument(node, 7, "num_experts", 1))
        over, sent = split_by(operands[3], lambda type_: type_ == S(0)), _sent_over(operands, axes)
        orders = 2 if table_of(node) is not None and len(sent) > 1 else 1
        found[experts, tuple(over), tuple(sent), orders] = orders * (experts + 1) * torch.int64.itemsize
    return sum(found.values())


def _table_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """By load, ranks of several axes talk as those of one."""
    over = [axes[position] for position in _sent_over(operands, axes)]
    if table_of(call.node) is None or are_neighbours(over):
        return None
    return f"tokens are exchanged by load over axes {', '.join(axis.name for axis in over)}, which are not neighbours"


def _split_error(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> str | None:
    """Experts are parameters, cut evenly."""
    over = [axes[position] for position in split_by(operands[3], lambda type_: type_ == S(0))]
    shared = [axis.name for axis in over if axis.shares]
    return f"experts are split in shares over axis {shared[0]}" if shared else None


def _inside(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Sent:
    """Counts; then rows to the experts and back, over each axis, in chunks; their gradients the same ways."""
    over, rows = _sent_over(operands, axes), _rows(call, operands, axes)
    if not over:
        return sent_for_slices(call, operands, axes, (rows.sent, rows.mean), 1)
    table = table_of(call.node)
    legs: list[tuple[int, ...]] = [(axis,) for axis in reversed(over)]
    chunks = int(call.arguments["chunks"])
    if table is not None:
        _, how, chunks = table.at(rows.mean)
        legs = [tuple(over)] if how == FLAT else legs
    (_, width), result = (local_shape(shape, types, axes) for shape, types in _ends(call, operands))
    travel = Exchanged(rows.sent - rows.home, max(0, rows.mean - rows.home), rows.most)
    busiest_rows = _busiest_by_leg(travel, legs, axes)
    there, back = (
        [_leg(travel.sent, most, size, leg, chunks) for leg, most in zip(legs, busiest_rows, strict=True)]
        for size in (width * call.tensor(0).itemsize, result[1] * _made_itemsize(call))
    )
    back.reverse()
    moved = [leg for legs in (*there[:-1], _beside(there[-1], back[0]), *back[1:]) for leg in legs]
    told = table.chunks if table is not None else 0
    sliced, sliced_back = sent_for_slices(call, operands, axes, (rows.sent, rows.mean), chunks, told)
    counts = _counts(_counted(call, operands, axes) * 8, over, axes, chunks, table)
    replicated, replicated_back = sent_for_replicas(call, operands, axes, over)
    return [*counts, *replicated, *moved, *sliced], [*moved, *replicated_back, *sliced_back]


def _counts(
    numbers: int, over: list[int], axes: tuple[Axis, ...], chunks: int, table: ExchangeTable | None
) -> list[Inner]:
    """How many rows there are of each expert and chunk, of so many bytes a chunk: along each axis; by load, all ranks
    are told those of all."""
    if table is None:
        return [Inner("all_to_all", axis, numbers * chunks) for axis in reversed(over)]
    ranks = math.prod(axes[axis].size for axis in over)
    return [Inner("all_gather", over[0], numbers * table.chunks * ranks, also=tuple(over[1:]))]


def _busiest_by_leg(rows: Exchanged, legs: Sequence[tuple[int, ...]], axes: tuple[Axis, ...]) -> list[int]:
    """Rows of the busiest rank after each leg: where others follow, the rows for a busy rank are still on all the ranks
    that these start from."""
    ahead = [math.prod(axes[axis].size for leg in legs[number + 1 :] for axis in leg) for number in range(len(legs))]
    return [rows.sent + -(-max(0, rows.mean - rows.sent) // count) for count in ahead]


def _leg(sent: int, most: int, row_bytes: int, leg: tuple[int, ...], chunks: int) -> list[Inner]:
    """One exchange a chunk."""
    own, busiest_own = (-(-rows // chunks) * row_bytes for rows in (sent, most))
    return [Inner("exchange", leg[0], own, busiest_own, also=leg[1:]) for _ in range(chunks)]


def _beside(there: list[Inner], back: list[Inner]) -> list[Inner]:
    """Of the last way there and the first way back: the first chunk and the last way home are waited for; while a chunk
    is computed, the next one comes and the one before goes home."""
    share = 1 / len(there)
    return [
        there[0],
        *(
            come._replace(
                num_bytes=come.num_bytes + go.num_bytes, busiest_bytes=come.busiest_bytes + go.busiest_bytes,
                is_beside=True, beside_share=share,
            )
            for come, go in zip(there[1:], back, strict=False)
        ),
        back[-1],
    ]  # fmt: skip


def _ends(call: Call, operands: tuple[Placement, ...]) -> list[tuple[Shape, Placement]]:
    """Shapes and placements of a token, and of what comes back of it: as wide as `down` makes it."""
    tokens, down = call.shape(0), call.shape(4)
    width = tuple(S(1) if type_ == S(2) else R for type_ in operands[4])
    return [(tokens, operands[0]), ((tokens[0], down[2]), width)]


def _made_itemsize(call: Call) -> int:
    return call.tensor(4).itemsize


def _rows(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> Exchanged:
    over = exchanged_over(operands)
    tokens, choices = local_shape(call.shape(1), operands[1], axes)
    ranks = math.prod(axes[position].size for position in over)
    replicas = replicas_of(call.node)
    return exchanged_rows(tokens, choices, call.arguments["num_experts"], ranks, call.arguments[EXPECTED], replicas)


def _counted(call: Call, operands: tuple[Placement, ...], axes: tuple[Axis, ...]) -> int:
    """The numbers of choices that a rank sends along each axis: one for each expert that they may go to."""
    experts, ranks = int(call.arguments["num_experts"]), 1
    for position in split_by(operands[3], lambda type_: type_ == S(0)):
        experts = -(-experts // axes[position].size)
        ranks *= axes[position].size if operands[0][position] == S(0) else 1
    return experts * ranks


def worked_shapes(
    shapes: tuple[Shape, ...], operands: tuple[Placement, ...], axes: tuple[Axis, ...]
) -> tuple[Shape, ...]:
    """Local shapes of the operands where choices are as many as all ranks have together that exchange them, or share
    slices of the experts, of which each does its share."""
    ranks = math.prod(axes[position].size for position in (*exchanged_over(operands), *sliced_over(operands)))
    tokens, choices = shapes[1]
    return (shapes[0], (tokens * ranks, choices), *shapes[2:])


def _memory(node: Node, sizes: Sizes, operands: tuple[Placement, ...]) -> RuntimeMemory:
    """Of each choice that comes: its row, hidden values before and after the activation; of each that was sent, what
    came of it, and its weight; the experts. Rows lie once more, in another order, while they are sent or arrive."""
    (tokens, _), (_, choices), _, up, _ = sizes.operands[:5]
    experts = int(argument(node, 7, "num_experts", 1))
    ranks = max(1, round(experts / max(1, up[0]))) if exchanged_over(operands) else 1
    replicas = replicas_of(node) if ranks > 1 else 0
    rows = exchanged_rows(tokens, choices, experts, ranks, dict(node.kwargs).get(EXPECTED, ""), replicas)
    table = table_of(node)
    told = 3 * ranks * experts * (table.chunks if table else 0)  # the counts of all ranks, by expert and chunk
    shared = math.prod(sizes.axis_sizes[position] for position in sliced_over(operands))
    if shared == 1:
        return _with_replicas(_memory_of(node, sizes, rows, told), node, sizes, replicas)
    hows = slice_table_of(node).hows
    found = [_memory_of(node, sizes, rows, told, shared, how) for how in SLICE_WAYS if how in hows]
    saved, *spaces = (
        max(sizes) for sizes in zip(*((one.saved_bytes or 0, *one.workspace) for one in found), strict=True)
    )
    return RuntimeMemory(saved, (spaces[0], spaces[1]), keeps=(3, 4))


def _memory_of(
    node: Node, sizes: Sizes, rows: Exchanged, told: int, shared: int = 1, how: str = TENSOR
) -> RuntimeMemory:
    """With so many numbers told. shared: among how many ranks the experts are sliced; how: what they send each other:
    rows of all of them, or slices, which lie whole beside, with their gradients. Rows are of the experts' dtype until
    they are home; what is made of them with their weights is of the result's."""
    (_, width), _, _, up, down = sizes.operands[:5]
    steps, times = 2 + str(node.args[5]).count("="), shared if how == DATA else 1
    come = rows.most * (shared if how == TENSOR else 1)
    hidden, gated, most = math.prod(up[2:]) * times, down[1] * times, max(width, down[2])
    numbers = 8 * (6 * come + 8 * rows.sent + told + (4 * shared * up[0] if shared > 1 else 0))
    itemsize = sizes.operand_itemsizes[3]
    arrived = come * (width + hidden + steps * gated) * itemsize
    home = rows.sent * (down[2] * itemsize + sizes.itemsize)
    passing = come * (2 * most + hidden) * itemsize + 3 * rows.sent * most * sizes.itemsize
    backward = passing + come * 2 * hidden * itemsize
    if shared > 1 and how == TENSOR:
        passing, backward = (size + (2 * come + shared * rows.sent) * most * itemsize for size in (passing, backward))
    whole = sum(math.prod(shape) for shape in sizes.operands[3:5]) * itemsize * shared if how == DATA else 0
    return RuntimeMemory(
        arrived + home + numbers + whole, (passing + numbers + 2 * whole, backward + 3 * whole), keeps=(3, 4)
    )


def _with_replicas(memory: RuntimeMemory, node: Node, sizes: Sizes, replicas: int) -> RuntimeMemory:
    """Their parameters are kept. While they come, one is copied; in the backward pass their gradients lie beside what
    is summed of them, and what this rank's own experts get of that beside what these have of their own rows."""
    if not replicas:
        return memory
    itemsize, experts = sizes.operand_itemsizes[3], max(1, sizes.operands[3][0])
    own = sum(math.prod(shape) for shape in sizes.operands[3:]) * itemsize
    copies = -(-replicas * own // experts)
    told = 8 * (2 * int(argument(node, 7, "num_experts", 1)) + 4 * math.prod(sizes.operands[1]) + 4 * replicas)
    forward, backward = memory.workspace
    return memory._replace(
        saved_bytes=(memory.saved_bytes or 0) + copies + told,
        workspace=(forward + 2 * copies + told, backward + 2 * copies + 2 * own),
    )


def _local(local: LocalCall) -> str:
    """The runtime's function always: the operator is autopar's own."""
    arguments = local.call.arguments
    axes = local.axes_where(3, lambda type_: type_ == S(0))
    both = local.axes_where(0, lambda type_: type_ == S(0))
    sizes = {axis.name: axis.size for axis in local.axes}
    exchanged = [axis for axis in axes if axis in both and sizes[axis] > 1]
    told = [repr(arguments[key]) for key in ("activation", "gated", "num_experts")]
    named = {name: local.variable(name) for name in ("up_bias", "down_bias") if local.call.has_tensor(name)}
    named |= {"paired": "True"} if arguments["paired"] else {}
    named |= {"exchanged": tuple_of(exchanged)} if exchanged else {}
    named |= _told_exchange(local, exchanged)
    named |= {"replicas": str(replicas_of(local.call.node))} if exchanged and replicas_of(local.call.node) else {}
    sliced = [axis for axis in local.axes_where(3, lambda type_: type_.kind == "S" and type_ != S(0)) if axis in both]
    for axis in sliced:
        ways = tuple(map(tuple, slice_table_of(local.call.node).ways))
        named |= {"slices": f"rt.SlicesByLoad({ways!r}, {axis})"} if sizes[axis] > 1 else {}
    options = [f"{name}={value}" for name, value in named.items()]
    return f"rt.routed_experts({', '.join([*local.names[:5], *told, tuple_of(axes), *options])})"


def _told_exchange(local: LocalCall, exchanged: Sequence[str]) -> dict[str, str]:
    """How the function exchanges over axes of these names."""
    table, chunks = table_of(local.call.node), local.call.arguments["chunks"]
    if not exchanged or (table is None and chunks == 1):
        return {}
    if table is None:
        return {"chunks": str(chunks)}
    joint = f"self.mesh.joined({', '.join(map(repr, exchanged))})" if len(exchanged) > 1 else exchanged[0]
    return {"by_load": f"rt.LoadTable({tuple(map(tuple, table.ways))!r}, {joint})"}


# How tokens choose experts ----------------------------------------


def with_routing(graph: Graph, routing: Routing | None) -> Graph:
    """The graph whose routed experts say how tokens choose them, each with the counts of all layers that are like it,
    so that equal layers stay equal. Raises PlanError where a histogram does not fit the model."""
    if routing is None:
        return graph
    layers = [node for node in graph.nodes if node.op == ROUTED_EXPERTS]
    sizes = {node.args[7] for node in layers}
    if not layers and routing.kind != BALANCED:
        raise PlanError(
            f"expected a model with routed experts that are known as such, for {routing}, found none in "
            f"{graph.model_name}; leave routing out"
        )
    texts = {n: _over(graph, routing, [node for node in layers if node.args[7] == n]).text for n in sizes}
    nodes = (_told(node, texts[node.args[7]]) if node.op == ROUTED_EXPERTS else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _told(node: Node, routing: str) -> Node:
    return replace(node, kwargs=tuple({**dict(node.kwargs), EXPECTED: routing}.items()))


def _over(graph: Graph, routing: Routing, layers: Sequence[Node]) -> Routing:
    """The routing of layers with as many experts each, in the order in which these are placed."""
    if routing.kind != HISTOGRAM:
        return routing
    return replace(
        routing,
        counts=tuple((node.scope.module, _by_position(graph, node, counts_of(routing, node))) for node in layers),
    )


def _by_position(graph: Graph, layer: Node, counts: tuple[float, ...]) -> tuple[float, ...]:
    """The counts of the experts as they are placed (`substitute.placing`)."""
    lookup = graph.producers.get(layer.args[1].tensor)
    table = graph.stored_by_tensor.get(lookup.operands[0]) if lookup is not None and lookup.operands else None
    if table is None or table.kind != "constant" or POSITIONS not in table.name:
        return counts
    positions = graph.values[table.tensor].tolist()
    return tuple(counts[expert] for expert in sorted(range(len(counts)), key=positions.__getitem__))


def counts_of(routing: Routing, layer: Node) -> tuple[float, ...]:
    """Of one layer, by expert of the model. Raises PlanError."""
    found, path, num_experts = routing.of_layer(layer.scope.module), layer.scope.module, layer.args[7]
    if found is None:
        known = ", ".join(itertools.islice(routing.layers, 4))
        raise PlanError(f"expected counts for the experts of {path!r} {layer.source}, found those of {known}")
    if len(found) != num_experts:
        raise PlanError(f"expected counts of {num_experts} experts for {path!r} {layer.source}, found {len(found)}")
    return found


def _grouped_mm_local(local: LocalCall) -> str:
    """The operator is another library's, which the program need not import."""
    return f"rt.grouped_mm({', '.join(local.names)})"


EXPERTS: dict[str, Operator] = {
    ROUTED_EXPERTS: Operator(
        routed_experts, work=work.EXPERTS, saved=saved.routed_experts, lowered=_memory,
        limits=(_split_error, _table_error, sliced_error, replicas_error), inside=_inside, local=_local,
        needs_elements=True, worked=worked_shapes,
    ),
    "transformers.grouped_mm_fallback.default": Operator(
        work=work.GROUPED, saved=saved.matrices, local=_grouped_mm_local
    ),
    "_grouped_mm": Operator(work=work.GROUPED),
}  # fmt: skip
