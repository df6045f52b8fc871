"""Writes in place that autograd does not see, in the exported graph before it is made functional.

    no_grad: h.clamp_(-1, 1); use(h)   → t = clone(detach(h)); clamp_(t, -1, 1); copy_(h, overwritten(h, t)); use(h)
    no_grad: y = f(x); use(y)          → use(f(detach(x)))

Under `no_grad` (`inference_mode`, `set_grad_enabled(False)`), and by `x.detach()` or `x.data` anywhere, what is
written to a tensor's memory is its value from then on, for all that share the memory, while gradients pass to what
made it as if nothing had happened (`ops.writes`). What is made there has no gradient; a view that is taken there is of
the same memory, but has none either. A plain write needs no care: torch's functionalization knows what it does.

So each tensor of the graph is known by a node whose gradient is the memory's (`_KnownTensor.live`), and by whether it
is cut off from it (`_KnownTensor.cut`): read, such a tensor is detached; written to, it is `live` that is written to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._export.passes import replace_set_grad_with_hop_pass as replacing
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.overrides import TorchFunctionMode

from autopar.ops.writes import overwritten
from autopar.trace.dropout import arguments_of
from autopar.trace.markers import entered, left, repeated
from autopar.trace.saved import ExportedCall, memory
from autopar.trace.tied import tied_names

aten = torch.ops.aten

WRITTEN_ASIDE = "written aside"
"""In the meta data of an exported graph: `Aside`."""


@dataclass
class Aside:
    """What is written by `x.detach()` or `x.data`: the names of buffers. steps: all calls, and which write so to
    activations. returned: the memory of what is returned with a gradient."""

    buffers: set[str] = field(default_factory=set)
    steps: list[ExportedCall] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)


class UnfollowedError(Exception):
    """A write whose meaning no graph keeps; export adds the line."""


@contextmanager
def writes_kept(model: nn.Module) -> Iterator[Aside]:
    """While inside, torch.export of `model` keeps the meaning of writes and of regions without gradients.

    Yields what will tell of writes by `x.detach()` or `x.data`.
    """
    aside = Aside()
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    tied = tied_names(model)

    def kept(module: fx.GraphModule, signature: ExportGraphSignature) -> Any:
        """In place of torch's own pass, which drops regions that only write to views, as they return nothing."""
        for other, first in _tied_and_written(module.graph, signature, tied).values():
            other.replace_all_uses_with(first)
        specs = [spec for spec in signature.input_specs if spec.kind == InputKind.PARAMETER and spec.target in trained]
        lifted = [spec for spec in signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR]
        trained_names, constants = ({str(getattr(spec.arg, "name", "")) for spec in own} for own in (specs, lifted))
        buffers = {
            str(getattr(spec.arg, "name", "")): str(spec.target)
            for spec in signature.input_specs
            if spec.kind == InputKind.BUFFER
        }
        _GraphRewriter(module, trained_names, constants, buffers, aside).run()
        outputs: Any = module.graph.output_node().args[0]
        for argument, spec in zip(outputs, signature.output_specs, strict=True):
            if isinstance(argument, fx.Node):
                spec.arg.name = argument.name
        return module, signature

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mock.patch.object(replacing, "replace_set_grad_with_hop_pass", kept))
        unseen = stack.enter_context(_Unseen(model))
        stack.enter_context(mock.patch.object(torch.inference_mode, "__enter__", lambda mode: unseen.enter(mode)))
        stack.enter_context(mock.patch.object(torch.inference_mode, "__exit__", lambda mode, *_: unseen.leave(mode)))
        yield aside


def untie_written(program: ExportedProgram, model: nn.Module) -> None:
    """Of what is written to, later names that nothing reads now get memory of their own: torch cannot make a program
    functional whose inputs share what it writes to."""
    for name in _tied_and_written(program.graph, program.graph_signature, tied_names(model)):
        own = program.state_dict[name]
        other = torch.empty_like(own, device="meta")
        program.state_dict[name] = nn.Parameter(other, own.requires_grad) if isinstance(own, nn.Parameter) else other


def _tied_and_written(
    graph: fx.Graph, signature: ExportGraphSignature, tied: Mapping[str, str]
) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Of stored tensors that are written to, the later names, each with its placeholder and that of the first name."""
    changed = [x for node in graph.nodes for x in (*written_by(node), *_statistics(node))]
    written = {own for x in changed for own in memory(x.meta.get("val"))}
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    named = {str(spec.target): nodes[str(getattr(spec.arg, "name", ""))] for spec in signature.input_specs}
    pairs = {name: (named[name], named[first]) for name, first in tied.items() if {name, first} <= named.keys()}
    return {name: pair for name, pair in pairs.items() if not memory(pair[1].meta.get("val")).isdisjoint(written)}


_GETS_DATA, _SETS_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


class _Unseen(TorchFunctionMode):
    """What export does not see, as what it does: `x.data` is detached x, `x.data = y` a copy into it without gradient,
    and inference mode is no_grad but for errors of what is made there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_inference = 0  # of the regions around

    def enter(self, mode: Any) -> None:
        mode._before = torch.is_grad_enabled()
        self.num_inference += mode.mode
        torch._C._set_grad_enabled(not mode.mode)

    def leave(self, mode: Any) -> None:
        self.num_inference -= mode.mode
        torch._C._set_grad_enabled(mode._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GETS_DATA:
            return args[0].detach()
        if func == _SETS_DATA:
            x, value = args
            if not self._owns_memory(x):
                raise UnfollowedError(
                    "expected `.data = …` of a parameter, buffer or activation itself, found an alias"
                )
            if self.num_inference:
                raise UnfollowedError("expected no `.data = …` in inference_mode: what it assigns can have no gradient")
            if x.shape != value.shape or x.dtype != value.dtype:
                raise UnfollowedError(
                    f"expected `.data = …` to assign {list(x.shape)} {x.dtype}, found {list(value.shape)} "
                    f"{value.dtype}: a tensor that changes its shape or dtype in forward cannot be planned"
                )
            x.detach().copy_(value.detach())
            return None
        return func(*args, **(kwargs or {}))

    def _owns_memory(self, x: Tensor) -> bool:
        """Whether an assigned `.data` is seen wherever the tensor is: an alias would part from the others."""
        state = (*self.model.parameters(), *self.model.buffers())
        return any(x is own for own in state) or (x.grad_fn is not None and not x._is_view())


@dataclass(frozen=True)
class _KnownTensor:
    """A tensor of the model: the node of its memory's gradient, and whether it is cut off from that."""

    live: fx.Node
    cut: bool = False


class _GraphRewriter:
    """Rewrites one graph in place. trained: names of placeholders that have a gradient; constants: of tensors that are
    neither parameters nor buffers; buffers: their names in the model, by placeholder. aside: takes the names of those
    that are written to by a tensor cut off from them, and all calls."""

    def __init__(
        self, module: fx.GraphModule, trained: set[str], constants: set[str], buffers: Mapping[str, str],
        aside: Aside,
    ) -> None:  # fmt: skip
        self.aside, self.buffers = aside, dict[int, str]()  # by memory
        self.module, self.graph = module, module.graph
        self.known: dict[fx.Node, _KnownTensor] = {}
        self.detached: dict[fx.Node, fx.Node] = {}
        self.trained: set[int] = set()  # memory of tensors with a gradient
        self.constants: set[int] = set()  # memory of constants
        self.stored: set[int] = set()  # memory of parameters, buffers, constants and inputs
        self.steps: list[ExportedCall] = []
        for node in self.graph.find_nodes(op="placeholder"):
            self.stored.update(memory(node.meta.get("val")))
            if node.name in buffers:
                self.buffers.update(dict.fromkeys(memory(node.meta.get("val")), buffers[node.name]))
            if node.name in constants:
                self.constants.update(memory(node.meta.get("val")))
            if node.name in trained:
                self.trained.update(memory(node.meta.get("val")))
        self.enabled = True

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is torch._C._set_grad_enabled:
                self.enabled = bool(node.args[0])
                self.graph.erase_node(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self.enabled = True
                returned = self._read(node, {})
                self._tell(returned)
        self.graph.lint()
        self.module.recompile()

    def _tell(self, returned: frozenset[fx.Node]) -> None:
        self.aside.steps, self.aside.returned = self.steps, set()
        for operand in returned:
            self.aside.returned |= memory(operand.meta.get("val"))
        marked = any(step.node.target in (entered, left, repeated) for step in self.steps)
        if marked and any(step.aside for step in self.steps):
            raise UnfollowedError("what blocks keep that a marker stands for is not known: exported again without")

    # Reading ----------------------------------------

    def _of(self, node: fx.Node) -> _KnownTensor:
        return self.known.get(node, _KnownTensor(node))

    def _has_gradient(self, node: fx.Node) -> bool:
        """Whether what a node stands for is part of memory with a gradient."""
        value = node.meta.get("val")
        may_have = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        return may_have and not self.trained.isdisjoint(memory(value))

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether gradients of what is made of a tensor, here, reach something."""
        known = self._of(node)
        return self.enabled and not known.cut and self._has_gradient(known.live)

    def _make(self, place: fx.Node, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call for the line of one node, whose result looks as another's."""
        made = self.graph.call_function(target, args)
        made.meta = {**place.meta, "val": like.meta.get("val")}
        return made

    def _read(self, node: fx.Node, as_is: Mapping[fx.Node, fx.Node]) -> frozenset[fx.Node]:
        """Gives a call its operands: detached where no gradient may reach them. as_is: what is given as it is told.

        Returns those by which gradients pass.
        """
        given = dict(as_is)
        passing = [operand for operand in node.all_input_nodes if self._passes_on(operand)]
        with self.graph.inserting_before(node):
            for operand in node.all_input_nodes:
                live = self._of(operand).live
                if operand not in given:
                    cut_off = self._has_gradient(live) and not self._passes_on(operand)
                    given[operand] = self._detached(node, live) if cut_off else live
        node.args, node.kwargs = fx.map_arg(node.args, given.__getitem__), fx.map_arg(node.kwargs, given.__getitem__)
        return frozenset(given[operand] for operand in passing if given[operand] is self._of(operand).live)

    def _detached(self, place: fx.Node, live: fx.Node) -> fx.Node:
        """One for all who read it; of what is stored, one for each, as each belongs to the block that reads it."""
        if live.op == "placeholder":
            return self._make(place, live, aten.detach.default, live)
        if live not in self.detached:
            self.detached[live] = self._make(live, live, aten.detach.default, live)
        return self.detached[live]

    # Calls ----------------------------------------

    def _call(self, node: fx.Node) -> None:
        written = written_by(node)
        if node.target is aten.lift_fresh_copy.default:  # `torch.tensor(…)` in forward: made anew each time
            self.constants.difference_update(memory(node.meta.get("val")))
        if node.target is aten.detach_.default:  # from now on, what is written there has a history of its own
            with self.graph.inserting_before(node):
                self.known[node] = _KnownTensor(self._copy(node, self._of(written[0]).live))
        elif written:
            self._write(node, written)
        elif node.target is not operator.getitem:
            viewed = [operand for operand in node.all_input_nodes if _share(operand, node)]
            passes_on = any(self._passes_on(operand) for operand in node.all_input_nodes if operand not in viewed)
            self.steps.append(
                ExportedCall(node, self._read(node, {operand: self._of(operand).live for operand in viewed}))
            )
            if passes_on:
                self.trained.update(memory(node.meta.get("val")))
            for result in _results(node):
                source = next((self._of(operand) for operand in viewed if _share(operand, result)), None)
                if source is not None and node.target is aten.detach.default:
                    self.known[result] = _KnownTensor(source.live, cut=True)
                elif source is not None:
                    self.known[result] = _KnownTensor(result, cut=source.cut or not self.enabled)

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        if str(node.target).startswith(("aten.set_", "aten.resize")):
            raise UnfollowedError(
                f"{node.target} gives a tensor other memory: use copy_\n{node.meta.get('stack_trace')}"
            )
        if any(not self.constants.isdisjoint(memory(target.meta.get("val"))) for target in written):
            raise UnfollowedError(
                f"{node.target} writes to a tensor that outlives the step and is neither a parameter nor a buffer "
                "of the model: register it with register_buffer, or write to a clone of it\n"
                f"{node.meta.get('stack_trace', '')}"
            )
        passes_on = any(self._passes_on(operand) for operand in node.all_input_nodes if operand not in written)
        is_cut = any(self._of(target).cut for target in written)
        if is_cut and passes_on:
            raise UnfollowedError(
                f"{node.target} writes a value that has a gradient to a tensor that was detached, or is a view taken "
                "under no_grad: clone the tensor before writing to it, or detach what is written\n"
                f"{node.meta.get('stack_trace', '')}"
            )
        own = set().union(*(memory(target.meta.get("val")) for target in written)) if is_cut else set[int]()
        self.aside.buffers.update(self.buffers[one] for one in own if one in self.buffers)
        targets = {target: self._of(target).live for target in written}
        unseen = [t for t, live in targets.items() if self._has_gradient(live) and (is_cut or not self.enabled)]
        with self.graph.inserting_before(node):
            copies = {target: self._copy(node, targets[target]) for target in unseen}
        passes = self._read(node, {**targets, **copies})
        self.steps.append(ExportedCall(node, passes, frozenset(own - self.stored)))
        with self.graph.inserting_after(node):
            for target in unseen:
                self._put(node, targets[target], copies[target])
        if passes_on:
            self.trained.update(*(memory(live.meta.get("val")) for live in targets.values()))
        for result in _results(node):
            for target in written:
                if _share(target, result):
                    self.known[result] = self._of(target)

    def _copy(self, place: fx.Node, live: fx.Node) -> fx.Node:
        return self._make(place, live, aten.clone.default, self._detached(place, live))

    def _put(self, place: fx.Node, live: fx.Node, value: fx.Node) -> None:
        """Writes a value, by which the gradient passes, into what `live` stands for."""
        written = self._make(place, live, aten.copy_.default, live, live)
        with self.graph.inserting_before(written):
            written.args = (live, self._make(place, live, overwritten, live, value))


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes of a call's results: its own, or where it has several, those of the items that are read."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items or [node]


def _share(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes stand for parts of the same memory."""
    return not memory(node.meta.get("val")).isdisjoint(memory(other.meta.get("val")))


#: of what writes to running statistics, though its schema does not say so: the argument that says whether it does
_STATISTICS: dict[Any, str] = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm writes to."""
    flag = _STATISTICS.get(node.target)
    given = arguments_of(node) if flag is not None else {}
    if flag is None or not given[flag]:
        return []
    return [given[name] for name in ("running_mean", "running_var") if isinstance(given.get(name), fx.Node)]


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = arguments_of(node)
    found: list[fx.Node] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            items = value if isinstance(value, (tuple, list)) else [value]
            found += [item for item in items if isinstance(item, fx.Node)]
    return list(dict.fromkeys(found))
