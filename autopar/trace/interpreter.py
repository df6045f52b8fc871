"""Runs a traced graph on one device, operator by operator: what the graph means, to compare with the model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Node, map_references
from autopar.ir.structure import HOOK, OWN_BACKWARD, has_own_backward, is_random
from autopar.ops import overload, real
from autopar.ops.functions import call_own
from autopar.trace.smaller import Sizes, fitted

NOTHING: Mapping[str, Callable[..., Any]] = MappingProxyType({})
Seen = Callable[[Node, list[tuple[str, Tensor]]], None]


def run_graph(
    graph: Graph,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    device: str = "cpu",
    keep_all: bool = True,
    sizes: Sizes | None = None,
    seen: Seen | None = None,
    instead: Mapping[str, Callable[..., Any]] = NOTHING,
) -> dict[str, Tensor]:
    """The value of every tensor by name; without `keep_all`, of outputs and what forward changes alone.

    state: the model's parameters and buffers by name, which are read, never written. inputs: by the graph's names.
    sizes: of inputs that are cut, and of all that is made of these, what they are now (`trace.smaller`).
    seen: called with each node and its named results, as soon as they are made.
    instead: functions that take the place of operators, by name; each is called with the node before its arguments.
    """
    values = dict(inputs)
    for item in graph.stored:
        value = graph.values[item.name] if item.kind == "constant" else state[item.name]
        frozen = value.detach() if item.kind == "parameter" else value.detach().clone()
        values[item.tensor] = value if item.requires_grad else frozen
    dead = {} if keep_all else _last_reads(graph)
    for node in graph.nodes:
        args, kwargs = real(map_references((node.args, dict(node.kwargs)), values.__getitem__), device)
        if node.op == "aten.native_dropout.default":
            args = [args[0].contiguous(), *args[1:]]  # masks are of elements in order (`trace.dropout`), not of memory
        if node.op in OWN_BACKWARD:
            made: Any = call_own(node, args[0 if node.op == HOOK else 1])
        elif node.op in instead:
            made = instead[node.op](node, *args, **kwargs)
        else:
            before = drawn_states() if has_own_backward(node) else None
            made = overload(node.op)(*fitted(graph, node, args, sizes or {}), **kwargs)
            if before is not None and not is_random(node) and drawn_states() != before:
                raise undeclared_draws(node)
        results = made if isinstance(made, (tuple, list)) else [made]
        named = [(name, value) for name, value in zip(node.outputs, results, strict=True) if name is not None]
        values.update(named)
        if seen is not None:
            seen(node, named)
        del args, kwargs, made, results, named
        for name in dead.get(node.name, ()):
            del values[name]
    return values


def _last_reads(graph: Graph) -> dict[str, list[str]]:
    """For each node, the tensors that nothing reads after it."""
    kept = {*graph.outputs, *graph.mutations.values()}
    last = {name: node.name for node in graph.nodes for name in (*node.results, *node.operands)}
    dead: dict[str, list[str]] = {}
    for name, node_name in last.items():
        if name not in kept:
            dead.setdefault(node_name, []).append(name)
    return dead


def drawn_states() -> tuple[bytes, ...]:
    """Of all generators that an operator may draw from: two are equal where nothing has drawn between."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        states += torch.cuda.get_rng_state_all()
    python = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    return (python, *(state.numpy().tobytes() for state in states))


def undeclared_draws(node: Node, where: str = "") -> TraceError:
    """Each rank would draw its own numbers."""
    return TraceError(
        f"expected {node.op} at {node.source or 'an unknown line'} to draw no random numbers{where}, found that it "
        "does. Draw with torch's functions, in its forward, and say so where it is defined, by torch.library.custom_op("
        "…, tags=torch.Tag.nondeterministic_seeded), so that all ranks draw the same; or give it them as an operand"
    )
