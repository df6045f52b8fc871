"""DTensor's operator registry as a source of rules for the long tail. The one file behind the torch pin.

The registry says how an operator may run on sharded operands; on one mesh axis its Shard(d) is our `S(d)`, its
Replicate our `R`, its Partial("sum") our `P`. Any other placement (other reductions, masks) drops the rule. It
speaks two dialects: *single-dim strategies* list their rules outright; *op strategies* answer for given operand
placements, so they are asked about each operand in turn and every answer is collected.

The registry promises forward values only. Ours is a promise about gradients too, so the property test of the table
also runs over torch's samples of these operators; `proofs` says which of them hold, and only those are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.ir.graph import Atom, map_references, references
from autopar.ir.placement import P, R, S, Type
from autopar.ops import proofs
from autopar.ops.call import Call, overload
from autopar.ops.notation import AxisRule

Answer = tuple[list[AxisRule], str]
Found = tuple[tuple[Type | None, ...], tuple[Type | None, ...]]  # operands, results; None: not one of our types

#: has rules for single losses only: what they are made of has rules for their mean too
_BETTER_TAKEN_APART = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_NO_RULE = "no rule in the table, none in DTensor's registry"
_RANKS = 2
_CACHE: dict[Any, Answer] = {}


def rules(call: Call) -> Answer:
    """The registry's rules for a call on one mesh axis, and why there are none; equal calls are answered once."""
    op = overload(call.node.op)
    if torch.Tag.nondeterministic_seeded in op.tags:
        return [], "it draws random numbers"
    key = _key(call)
    if key not in _CACHE:
        _CACHE[key] = _ask(call)
    found = _CACHE[key]
    objection = proofs.objection(call.node.op)
    return ([], objection) if objection and found[0] else found


def knows(op: torch._ops.OpOverload) -> bool:
    """Whether the registry is worth asking about an operator, so that the trace may keep it whole."""
    if str(op) in _BETTER_TAKEN_APART or proofs.objection(str(op)) or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    try:
        return _strategies(op) is not None
    except Exception:  # private code of another project: whatever goes wrong there means "no rule"
        return False


def overloads() -> list[torch._ops.OpOverload]:
    """Every operator that the registry has a strategy for."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    return [*dict.fromkeys((*propagator.op_single_dim_strategy_funcs, *propagator.op_strategy_funcs))]


def _key(call: Call) -> Any:
    tensors = [call.tensor(position) for position in range(len(call.node.operands))]
    outputs = tuple(name is None for name in call.node.outputs)
    plain = map_references((call.node.args, call.node.kwargs), lambda name: None)
    return (call.node.op, repr(plain), tuple((t.shape, t.dtype) for t in tensors), outputs)


def _ask(call: Call) -> Answer:
    try:
        strategies = _strategies(overload(call.node.op))
        if strategies is None:
            return [], _NO_RULE
        kept = [rule for found in strategies(call) if (rule := _rule(call, *found)) is not None]
    except Exception as error:  # private code of another project: whatever goes wrong there means "no rule"
        return [], f"DTensor's registry failed with {type(error).__name__}"
    return list(dict.fromkeys(kept)), "" if kept else "DTensor has no rule for these arguments"


def _rule(call: Call, operands: tuple[Type | None, ...], results: tuple[Type | None, ...]) -> AxisRule | None:
    """The rule of the results that are named, when our types can say it and its local run needs nothing more.

    Sharded operands with replicated results would need communication; replicated operands with sharded results
    would need the local operator to know its rank.
    """
    if len(operands) != len(call.node.operands) or len(results) != len(call.node.outputs):
        return None
    named = [results[position] for position in call.result_positions()]
    types = [type_ for type_ in (*operands, *named) if type_ is not None]
    if len(types) < len(operands) + len(named) or set(operands) == {R} or R in named:
        return None
    shapes = (*call.operand_shapes, *call.result_shapes)
    if any(type_.kind == "S" and shape[type_.dim] == 1 for type_, shape in zip(types, shapes, strict=True)):
        return None
    return AxisRule(tuple(types[: len(operands)]), tuple(types[len(operands) :]))


def _strategies(op: torch._ops.OpOverload) -> Callable[[Call], Iterator[Found]] | None:
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if op in propagator.op_to_scalar_shape_adjuster:
        return None  # its arguments hold sizes that the local call would have to change
    if op in propagator.op_single_dim_strategy_funcs:
        return partial(_single_dim, propagator.op_single_dim_strategy_funcs[op].func)
    if op in propagator.op_strategy_funcs:
        return partial(_op_strategies, propagator.op_strategy_funcs[op])
    return None


def _single_dim(strategy: Callable[..., Any], call: Call) -> Iterator[Found]:
    metas = iter([_meta(call, position) for position in range(len(call.node.operands))])
    args, kwargs = _arguments(call, lambda _: next(metas))
    for row in strategy(overload(call.node.op), args, kwargs):
        types = tuple(map(_type, row))
        num_results = len(types) - len(call.node.operands)
        yield types[num_results:], types[:num_results]


def _op_strategies(strategy: Callable[..., Any], call: Call) -> Iterator[Found]:
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

    for types in dict.fromkeys(_candidates(call)):
        strategies = iter([_strategy(call, position, type_) for position, type_ in enumerate(types)])
        args, kwargs = _arguments(call, lambda _, made=strategies: next(made))  # type: ignore[misc]
        try:
            answer = strategy(OpSchema(overload(call.node.op), args, kwargs))
        except Exception:  # private code again: these operand placements are not among its rules
            continue
        if isinstance(answer, OpStrategy):
            yield from (_from_spec(call, spec) for spec in answer.strategies)


def _from_spec(call: Call, spec: Any) -> Found:
    outputs = spec.output_specs if isinstance(spec.output_specs, (tuple, list)) else [spec.output_specs]
    if len(outputs) == 1:
        outputs = list(outputs) * len(call.node.outputs)
    inputs = spec.input_specs or [spec.output_specs] * len(call.node.operands)
    return _types(inputs), _types(outputs)


def _types(specs: Any) -> tuple[Type | None, ...]:
    return tuple(None if spec is None else _type(spec.placements[0]) for spec in specs)


def _candidates(call: Call) -> Iterator[tuple[Type, ...]]:
    """Operand placements worth asking about: one operand split or a summand, or all of them alike."""
    count = len(call.node.operands)
    for position, shape in enumerate(call.operand_shapes):
        for type_ in (P, *(S(dim) for dim, size in enumerate(shape) if size >= _RANKS)):
            yield tuple(type_ if other == position else R for other in range(count))
    for dim in range(min((len(shape) for shape in call.operand_shapes), default=0)):
        if all(shape[dim] >= _RANKS for shape in call.operand_shapes):
            yield (S(dim),) * count
    yield (P,) * count


def _arguments(call: Call, operand: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(_plain(value, operand) for value in call.node.args)
    return args, {name: _plain(value, operand) for name, value in call.node.kwargs}


def _plain(value: Any, operand: Callable[[str], Any]) -> Any:
    """An argument as torch passes it; several operands in one list are a TupleStrategy where strategies are asked."""
    from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy

    if isinstance(value, Atom):
        return getattr(torch, value.name, None)
    if isinstance(value, tuple) and not hasattr(value, "tensor"):
        items = [_plain(item, operand) for item in value]
        return TupleStrategy(items) if items and all(isinstance(i, OpStrategy) for i in items) else items
    return map_references(value, operand) if list(references(value)) else value


def _meta(call: Call, position: int) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    tensor = call.tensor(position)
    strides = torch.empty(tensor.shape, device="meta").stride()
    return TensorMeta(torch.Size(tensor.shape), strides, getattr(torch, tensor.dtype))


def _strategy(call: Call, position: int, type_: Type) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

    placement: Any = {"R": Replicate, "P": Partial}.get(type_.kind, lambda: Shard(type_.dim))()
    return OpStrategy([OpSpec(DTensorSpec(_mesh(), (placement,), tensor_meta=_meta(call, position)))])


@lru_cache(maxsize=1)
def _mesh() -> Any:
    """A mesh of two ranks that belongs to no process group: strategies only ask for its shape."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(_RANKS), _init_backend=False, _rank=0)


def _type(placement: Any) -> Type | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Replicate:
        return R
    if type(placement) is Partial:
        return P if placement.reduce_op == "sum" else None
    if type(placement) is Shard or type(placement).__name__ == "_ShardingPlaceholder":
        return S(placement.dim)
    return None
