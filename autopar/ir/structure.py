"""What the emitter and the simulator must agree on: which tensors are constant, and which modules become blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache

import torch

from autopar.ir.graph import IDENTITY, Graph, Node, found_once
from autopar.ir.mesh import MICROBATCH
from autopar.ir.placement import Placement
from autopar.ir.plan import Stage

#: operators, without their overloads, that draw random numbers (those that write in place never get here)
RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "exponential", "feature_alpha_dropout",
    "feature_dropout", "geometric", "log_normal", "multinomial", "native_dropout", "normal", "normal_functional",
    "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "rrelu",
    "rrelu_with_noise", "rrelu_with_noise_functional", "uniform", "_sample_dirichlet", "_standard_gamma",
    "_fused_dropout",
})  # fmt: skip


def region_of(recompute: tuple[str, ...], module: str) -> int:
    """Which of the recomputed module paths a module lies in; −1 for none. The first that holds it counts."""
    places = _places(recompute)
    found = [places[path] for path in ("", module, *_around(module)) if path in places]
    return min(found, default=-1)


@lru_cache(maxsize=64)
def _places(recompute: tuple[str, ...]) -> dict[str, int]:
    """Where each path stands first: asked of every operator of a model, for as many paths as it has blocks."""
    return {path: len(recompute) - 1 - place for place, path in enumerate(reversed(recompute))}


def _around(module: str) -> Iterator[str]:
    """The modules that hold a module, by their paths, but for the root."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


#: a call of a `torch.autograd.Function` (`ops.functions`)
FUNCTION = "autopar.function.default"
#: passes a tensor on, and its gradient through a hook (`ops.functions`)
HOOK = "autopar.gradient_hook.default"
#: operators that the program runs by the model's own Python
OWN_BACKWARD = frozenset({FUNCTION, HOOK})
_TORCHS_OWN = ("aten.", "prims.", "autopar.")

_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})


def is_random(node: Node) -> bool:
    """Whether the operator draws random numbers: two equal calls of it are not equal, nor are those of two steps."""
    if node.op == FUNCTION:
        return bool(node.args[-1])
    if not node.op.startswith(_TORCHS_OWN):
        return _is_tagged_random(node.op)
    name = node.op.split(".")[1]
    if name in _RECURRENT:
        dropout, train = node.args[-4:-2] if node.op.endswith(".input") else (1.0, True)
        return bool(train) and dropout > 0.0
    if name == "scaled_dot_product_attention":
        given = dict(node.kwargs).get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return bool(given > 0.0)
    return name in RANDOM


@cache
def _is_tagged_random(op: str) -> bool:
    """What a custom operator says of itself."""
    namespace, name, overload = op.split(".", 2)
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return torch.Tag.nondeterministic_seeded in found.tags


def has_own_backward(node: Node) -> bool:
    """Whether the backward is somebody's own, Functions, hooks and custom operators: that of a sum of gradients need
    not be the sum of those of each, as torch's derivatives are."""
    return node.op in OWN_BACKWARD or not node.op.startswith(_TORCHS_OWN)


def runs_once(node: Node) -> bool:
    """Whether the operator runs in one stage, however many read its results: draws of two stages are not equal, and a
    backward of somebody's own is given the whole gradient, unless that of a sum is known to be the sum."""
    if node.op == HOOK:
        return not node.args[-1]  # linear
    return has_own_backward(node) or is_random(node)


def constant_tensors(graph: Graph) -> set[str]:
    """Tensors that depend on no input, on nothing that forward updates, and on no chance: the same at every step.

    In training on no parameter either; in inference as `made_once` says.
    """
    return set(_constants(graph))


@found_once
def _constants(graph: Graph) -> frozenset[str]:
    kept = {s.tensor: s.kind for s in graph.stored if s.name not in graph.mutations}
    parameters = {tensor for tensor, kind in kept.items() if kind == "parameter"}
    given = kept.keys() - parameters
    known = given | parameters if graph.inference else given
    ends = {*graph.outputs, *graph.mutations.values()}
    return frozenset(given | made_once(graph.nodes, known, parameters, lambda n: graph.tensors[n].num_bytes, ends))


def folded_tensors(graph: Graph) -> set[str]:
    """Those that in inference are made of parameters, or only for such: when these are loaded, never by a step after
    that."""
    if not graph.inference:
        return set()
    parameters = {s.tensor for s in graph.stored if s.kind == "parameter"}
    constant, found = constant_tensors(graph), set(parameters)
    for node in graph.nodes:
        if constant.issuperset(node.results) and not found.isdisjoint(node.operands):
            found.update(node.results)
    ends = {*graph.outputs, *graph.mutations.values()}
    for node in reversed(graph.nodes):
        readers = {name for result in node.results for user, _ in graph.consumers[result] for name in user.results}
        if constant.issuperset(node.results) and ends.isdisjoint(node.results) and readers and readers <= found:
            found.update(node.results)
    return found - parameters


def made_once(
    nodes: Sequence[Node], given: set[str], parameters: set[str], num_bytes: Callable[[str], int], ends: Iterable[str]
) -> set[str]:
    """What nodes make of given tensors alone, in inference parameters too, but for what is not worth to be kept.

    What a step reads is kept where it is no larger than the parameters that it is made of, or made of none: a merged
    low-rank adapter is, a decompressed weight is made anew each time. ends: what is read beside the nodes' reading.
    """
    sources = {name: frozenset((name,)) & parameters for name in given}
    for node in nodes:
        if not is_random(node) and all(name in sources for name in node.operands):
            of_node = frozenset[str]().union(*(sources[name] for name in node.operands))
            sources.update(dict.fromkeys(node.results, of_node))
    read, found = set(ends), set[str]()
    for node in reversed(nodes):
        made_of = sources.get(node.results[0]) if node.results else None
        kept = sum(num_bytes(name) for name in node.results if name in read)
        if made_of is not None and (not made_of or kept <= sum(map(num_bytes, made_of))):
            found.update(node.results)
        else:
            read.update(node.operands)
    return _closed(nodes, given, found)


def _closed(nodes: Sequence[Node], given: set[str], found: set[str]) -> set[str]:
    """Without what is made of something that is not kept."""
    known = set(given)
    for node in nodes:
        if found.issuperset(node.results) and known.issuperset(node.operands):
            known.update(node.results)
    return found & known


def is_cut(stage: Stage, placement: Placement) -> bool:
    """Whether a value is a microbatch's slice of what the step has, or is there in the first of them alone."""
    pairs = zip(stage.axes, placement, strict=True)
    return any(axis.name == MICROBATCH and type_.kind in "SP" for axis, type_ in pairs)


def computed_once(graph: Graph, stage: Stage) -> set[str]:
    """Constants, but for results that are slices for a microbatch."""
    plans = stage.nodes
    made = (pair for node in graph.nodes for pair in zip(node.results, plans[node.name].results, strict=True))
    return constant_tensors(graph) - {name for name, placement in made if is_cut(stage, placement)}


def block_paths(graph: Graph, recompute: Iterable[str] = ()) -> set[str]:
    """Modules that have a module inside that runs something each step, and those that are recomputed.

    Each is emitted as a class of its own. A block's parameters are gathered and freed together. Other modules are
    written out where they are called.
    """
    return {*_running_paths(graph), *recompute}


@found_once
def _running_paths(graph: Graph) -> frozenset[str]:
    constant = constant_tensors(graph)
    running = (node for node in graph.nodes if node.op != IDENTITY and not constant.issuperset(node.results))
    return frozenset(path for node in running for path, _ in node.scope.path[:-1] if path)


@found_once
def tensors_of_inputs(graph: Graph) -> frozenset[str]:
    """What follows from the model's inputs, constants and buffers that stay, without chance or parameters: several
    microbatches can know it of the whole batch before the first of them."""
    known = {name for name in graph.inputs if name not in graph.received}
    known |= {s.tensor for s in graph.stored if s.kind != "parameter" and s.name not in graph.mutations}
    for node in graph.nodes:
        if known.issuperset(node.operands) and not is_random(node):
            known.update(node.results)
    return frozenset(known)


def batch_inputs(graph: Graph) -> tuple[str, ...]:
    """The inputs whose dim 0 is the batch: those as long as the first input along dim 0."""
    shapes = {name: graph.tensors[name].shape for name in graph.inputs}
    batch = next((shape[0] for shape in shapes.values() if shape), 0)
    return tuple(name for name, shape in shapes.items() if shape and shape[0] == batch)
