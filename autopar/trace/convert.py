"""ExportedProgram -> Graph: the same operators as plain data, with module scopes, source lines and gradients."""

from __future__ import annotations

import inspect
import re
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import TraceError
from autopar.ir.graph import Atom, Graph, Node, Ref, Scope, Stored, Tensor, map_references
from autopar.ir.structure import FUNCTION, HOOK
from autopar.ops.writes import OVERWRITTEN
from autopar.trace.data_dependence import data_dependence
from autopar.trace.gradients import differentiable_results, is_view, saves
from autopar.trace.layouts import check_layout
from autopar.trace.lines import node_line, node_place, source_at
from autopar.trace.markers import CALLED, HOOKED, entered, function, hooked, left, repeated
from autopar.trace.regions import BlockRegion, regions
from autopar.trace.saved import written_while_kept
from autopar.trace.tied import tied_names
from autopar.trace.writes import WRITTEN_ASIDE, Aside

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""In training: it writes to its running statistics, and reads none in its backward pass."""
_UPDATES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def convert(
    program: ExportedProgram,
    model: nn.Module,
    names: list[str],
    paths: list[str],
    *,
    prefix: str,
    mode: str,
    is_part: bool = False,
) -> Graph:
    """The graph, in which blocks that the program has a marker for are written out; nodes have no final names yet.

    paths: of the outputs in what forward returns. is_part: the inputs have gradients, and all outputs are returned,
    behind the loss. Raises TraceError when training is asked for and no scalar loss is
    returned, or several of which none is called so.
    """
    return _Converter(program, model, names, prefix, mode == "train", is_part).graph(mode, paths)


class _Converter:
    def __init__(
        self, program: ExportedProgram, model: nn.Module, names: list[str], prefix: str, trains: bool, is_part: bool
    ) -> None:  # fmt: skip
        self.program, self.trains, self.is_part = program, trains, is_part
        aside: Aside = program.graph_module.meta.get(WRITTEN_ASIDE, Aside())
        self.aside = {name.removeprefix(prefix) for name in aside.buffers}
        if trains and (found := written_while_kept(aside.steps, aside.returned)):
            written, keeps = found
            raise TraceError(
                f"expected forward to write to an activation before what reads its value in the backward pass, found "
                f"that {keeps.target} at {node_line(keeps)} does, and it is written to after that, by .data or "
                f".detach(), at\n  {node_line(written)}\nWrite to a clone of it, or before it is used."
            )
        self.model = model
        self.prefix = prefix
        self.inputs = self._input_names(names)
        self.tensors: dict[str, Tensor] = {}
        self.rename: MutableMapping[str, str] = {}  # fx node name -> tensor name
        self.nodes: list[Node] = []
        self.tied = tied_names(model)
        self.stored: dict[str, Stored] = {}
        self.values = {
            name.removeprefix(self.prefix): value for name, value in program.constants.items() if torch.is_tensor(value)
        }
        self.regions = regions(program)
        self.calls: dict[fx.Node, _FxCall] = {}
        self.num_copies = 0
        self.copy: _Copy | None = None  # the block that is being written out for another one

    def graph(self, mode: str, paths: list[str]) -> Graph:
        inputs = self._placeholders()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._write(node)
        outputs, mutations = self._outputs()
        loss = self._loss(outputs, paths) if mode == "train" else None
        return Graph(
            inputs=tuple(inputs),
            stored=self._in_order(),
            nodes=tuple(self.nodes),
            outputs=self._returned(loss, outputs),
            tensors=self.tensors,
            loss=loss,
            tied=self.tied,
            mutations=mutations,
            values=self.values,
            given_names={name: given for given, name in self.inputs.items() if given != name},
            model_name=type(self.model).__name__,
            training=self.model.training,
            inference=mode == "inference",
        )

    def _returned(self, loss: str | None, outputs: list[str]) -> tuple[str, ...]:
        if loss is None:
            return tuple(outputs)
        return (loss, *(name for name in outputs if name != loss)) if self.is_part else (loss,)

    def _placeholders(self) -> list[str]:
        """Names what the program is given; the model's inputs in order."""
        inputs = list(self.inputs.values())
        given = iter(inputs)
        flags = {name: p.requires_grad for name, p in self.model.named_parameters(remove_duplicate=False)}
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        for spec in self.program.graph_signature.input_specs:
            fx_name = str(getattr(spec.arg, "name", ""))
            value = placeholders[fx_name].meta["val"]
            if spec.kind == InputKind.USER_INPUT:
                self.rename[fx_name] = name = next(given)
                self._add(name, value, self.is_part and value.is_floating_point())
                continue
            if spec.kind not in _KINDS:
                raise TraceError(f"expected tensors as model state, found {spec.kind} ({spec.target})")
            target = str(spec.target).removeprefix(self.prefix)
            self.rename[fx_name] = name = self.tied.get(target, target)
            requires_grad = spec.kind == InputKind.PARAMETER and flags[name]
            self._store(name, value, _KINDS[spec.kind], requires_grad, spec.persistent is not False)
        self._hidden()
        return inputs

    def _input_names(self, names: list[str]) -> dict[str, str]:
        """The tensor for each input, by its name in forward: a name that nothing stored has, `query_input` for that of
        a parameter."""
        specs = self.program.graph_signature.input_specs
        taken = {str(spec.target).removeprefix(self.prefix) for spec in specs if spec.kind in _KINDS}
        for pairs in (self.model.named_parameters, self.model.named_buffers):
            taken.update(name for name, _ in pairs(remove_duplicate=False))
        found: dict[str, str] = {}
        for given in names:
            name = given
            while name in taken or (name != given and name in names):
                name += "_input"
            taken.add(name)
            found[given] = name
        return found

    def _store(self, name: str, value: Any, kind: Any, requires_grad: bool, persistent: bool) -> None:
        self._add(name, value, requires_grad)
        self.stored[name] = Stored(name, name, kind, requires_grad, persistent)

    def _hidden(self) -> None:
        """Stores what export did not see of the model."""
        for name, parameter in self.model.named_parameters():
            if name not in self.stored:
                self._store(name, parameter, "parameter", parameter.requires_grad, True)
        for path, module in self.model.named_modules():
            for own, buffer in module.named_buffers(path, recurse=False):
                name = self.tied.get(own, own)
                if name not in self.stored:
                    persistent = own.rpartition(".")[2] not in module._non_persistent_buffers_set
                    self._store(name, buffer, "buffer", False, persistent)

    def _in_order(self) -> tuple[Stored, ...]:
        """Parameters and buffers as the model has them, and then constants."""
        model = [name for pairs in (self.model.named_parameters(), self.model.named_buffers()) for name, _ in pairs]
        return tuple(self.stored[name] for name in dict.fromkeys((*model, *self.stored)))

    def _add(self, name: str, value: Any, differentiable: bool) -> None:
        self.tensors[name] = Tensor(name, *_looks(value), differentiable)

    def _write(self, node: fx.Node) -> None:
        if node.target in (entered, left):
            self.rename[node.name] = self.rename[cast(fx.Node, node.args[0]).name]
        elif node.target is repeated:
            self._repeat(node)
        else:
            self._call(node)

    def _repeat(self, node: fx.Node) -> None:
        """Writes the operators of a block once more, for one that does the same."""
        inputs, _, like, block = cast(tuple[list[fx.Node], list[fx.Node], str, str], node.args)
        region, outer = self.regions[like], self.rename
        self.num_copies += 1
        self.copy = _Copy(like, block, _scope(node, self.prefix), f"@{self.num_copies}")
        given = {mark.name: outer[inputs[position].name] for position, mark in region.inputs.items()}
        self.rename = ChainMap({**given, **self._own_state(region, self.copy)}, outer)
        for inner in region.nodes:
            self._call(inner)
        results = {at: self.rename[cast(fx.Node, mark.args[0]).name] for at, mark in region.results.items()}
        self.rename, self.copy = outer, None
        self.rename.update({user.name: results[cast(int, user.args[1])] for user in node.users})

    def _own_state(self, region: BlockRegion, copy: _Copy) -> dict[str, str]:
        """What the copy reads in place of what is stored for the block itself: its parameters, and its constants."""
        own = {}
        for fx_name in region.read:
            name = self.rename[fx_name]
            if self.stored[name].kind == "constant":
                own[fx_name] = again = copy.path_of(name) + copy.suffix
                self.tensors[again] = replace(self.tensors[name], name=again)
                self.stored[again] = replace(self.stored[name], name=again, tensor=again)
                self.values[again] = self.values[name]
            elif name.startswith(copy.like + "."):
                own[fx_name] = copy.path_of(name)
        return own

    def _call(self, node: fx.Node) -> None:
        if str(node.target) == "<built-in function getitem>" or "val" not in node.meta:
            return  # items are named by their producer; what has no value is an assertion
        call = self._read(node)
        scope = call.scope if self.copy is None else self.copy.scope_of(call.scope)
        many = isinstance(node.meta["val"], (tuple, list))
        outputs = self._result_names(node, len(call.results)) if many else (self._new(node),)
        args, kwargs = map_references((call.args, call.kwargs), lambda name: Ref(self.rename[name]))
        made = Node(self._name(node), call.op, args, kwargs, outputs, scope, call.source or self._source_in(scope))
        if node.target in (function, hooked):
            made = _own_backward(made)
        flags = differentiable_results(made, [self.tensors[name] for name in made.operands])
        for name, result, differentiable in zip(outputs, call.results, flags, strict=True):
            if name is not None:
                assert result is not None, f"expected {name} to be a tensor"
                self.tensors[name] = Tensor(name, *result, differentiable)
        self.nodes.append(made)

    def _read(self, node: fx.Node) -> _FxCall:
        """What a node says, which is the same for each copy of it."""
        if node not in self.calls:
            named = ((key, _argument(item, node)) for key, item in node.kwargs.items() if key != "pin_memory")
            args, kwargs, value = _argument(tuple(node.args), node), tuple(named), node.meta["val"]
            items = value if isinstance(value, (tuple, list)) else [value]
            if any(not isinstance(size, int) for item in items if torch.is_tensor(item) for size in item.shape):
                raise data_dependence(node_line(node), f"{node.target} makes a shape that values decide")
            for item in filter(torch.is_tensor, items):
                check_layout(item, f"a result of {node.target} at {node_line(node)}")
            looks = [_looks(item) if torch.is_tensor(item) else None for item in items]
            scope = _scope(node, self.prefix)
            self.calls[node] = _FxCall(str(node.target), args, kwargs, scope, source_at(node_place(node)), looks)
        return self.calls[node]

    def _name(self, node: fx.Node) -> str:
        """Until nodes are numbered: no input and nothing stored is called so, whatever a model calls them."""
        return f"%{node.name}" if self.copy is None else f"%{node.name}{self.copy.suffix}"

    def _new(self, node: fx.Node) -> str:
        """The name of the tensor that a node stands for."""
        self.rename[node.name] = name = self._name(node)
        return name

    def _source_in(self, scope: Scope) -> str:
        """Inside of autocast, where torch keeps no line of a node, that of the module's forward."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        return _source_of_forward(modules.get(scope.module, self.model))

    def _result_names(self, node: fx.Node, count: int) -> tuple[str | None, ...]:
        outputs: list[str | None] = [None] * count
        for user in node.users:
            position = int(user.args[1])  # type: ignore[arg-type]
            if outputs[position] is None:
                outputs[position] = self._name(user)
            self.rename[user.name] = outputs[position] or user.name
        return tuple(outputs)

    def _outputs(self) -> tuple[list[str], dict[str, str]]:
        outputs, mutations = [], {}
        made = {node.name: node for node in self.program.graph.nodes}
        for spec in self.program.graph_signature.output_specs:
            fx_name, written = str(getattr(spec.arg, "name", "")), str(spec.target).removeprefix(self.prefix)
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise TraceError(
                    f"expected forward to leave its inputs alone, but it writes to "
                    f"{self.rename.get(str(spec.target), written)!r} at\n  {node_line(made[fx_name])}\n"
                    "Clone the tensor before writing to it."
                )
            name = self.rename.get(fx_name)
            if name is None:
                continue  # a constant output such as None
            if spec.kind in _UPDATES:
                stored = self.stored[self.tied.get(written, written)]
                is_parameter = spec.kind == OutputKind.PARAMETER_MUTATION
                if self.trains:
                    self._check_not_saved(stored, name, made[fx_name])
                mutations[stored.name] = self._without_gradient(stored, name, made[fx_name]) if is_parameter else name
            elif spec.kind == OutputKind.USER_OUTPUT:
                outputs.append(name)
        return outputs, mutations

    def _without_gradient(self, parameter: Stored, name: str, made: fx.Node) -> str:
        """What a parameter becomes, as a tensor that has no gradient."""
        node = self._makers.get(name)
        while node is not None and (node.op == OVERWRITTEN or self._only_puts(node)):
            name = node.operands[-1 if node.op == OVERWRITTEN else 0]
            node = self._makers.get(name)
        if not self.tensors[name].differentiable:
            return name
        if not parameter.requires_grad:
            raise TraceError(
                f"expected forward to write values without a gradient to parameter {parameter.name!r}, found one that "
                f"has one at\n  {node_line(made)}\nWrite under torch.no_grad(), or what is detached."
            )
        detached = f"%{parameter.name}:new"
        self._add(detached, made.meta["val"], False)
        scope, source = (node.scope, node.source) if node is not None else (Scope(()), "")
        self.nodes.append(Node(detached, "aten.detach.default", (Ref(name),), (), (detached,), scope, source))
        return detached

    def _check_not_saved(self, stored: Stored, name: str, made: fx.Node) -> None:
        """Raises TraceError where a backward pass reads what a stored tensor was before it was written to: on one
        device it finds the new value there, or torch refuses to run it.

        Of a buffer that is assigned anew, what was read stays; only `x.data` and batch norm write unseen by autograd.
        """
        earlier, node = {stored.tensor}, self._makers.get(name)
        is_aside = stored.kind == "parameter" or stored.name in self.aside
        if not is_aside and (node is None or node.op != _BATCH_NORM):
            return
        while node is not None and (source := self._written_over(node, name)) is not None:
            earlier |= set() if self._only_puts(node) else {source}
            name, node = source, self._makers.get(source)
        pending = list(earlier)
        while pending:
            read = pending.pop()
            for reader in self._readers.get(read, ()):
                if is_view(reader.op):
                    pending += reader.results
                elif self._reads_later(reader, read):
                    raise TraceError(
                        f"expected forward to write to {stored.kind} {stored.name!r} before what reads its value in "
                        f"the backward pass, found that {reader.op} at {reader.source or 'an unknown line'} does, and "
                        f"it is written to after that, at\n  {node_line(made)}\nWrite before it is used, or after "
                        "optimizer.step()."
                    )

    def _written_over(self, node: Node, name: str) -> str | None:
        """The tensor that a node writes to, and makes `name` of; None for one that makes a tensor of its own."""
        if node.op == _BATCH_NORM and name in node.outputs[3:]:
            return node.operands[-2:][node.outputs.index(name) - 3]
        return node.operands[0] if self._only_puts(node) or node.op == OVERWRITTEN or "_scatter." in node.op else None

    def _reads_later(self, reader: Node, tensor: str) -> bool:
        """Whether the backward pass of what is returned reads the value that an operator had of a tensor."""
        if reader.op in (OVERWRITTEN, _BATCH_NORM) or self._led_from.isdisjoint(reader.results):
            return False
        return saves(reader, [self.tensors[x] for x in reader.operands], tensor)

    @cached_property
    def _led_from(self) -> set[str]:
        """Tensors by which gradients of what forward returns pass, once all nodes are written."""
        specs = self.program.graph_signature.output_specs
        given = (self.rename.get(str(getattr(s.arg, "name", ""))) for s in specs if s.kind == OutputKind.USER_OUTPUT)
        found = {name for name in given if name is not None and self.tensors[name].differentiable}
        for node in reversed(self.nodes):
            if not found.isdisjoint(node.results):
                found.update(name for name in node.operands if self.tensors[name].differentiable)
        return found

    @cached_property
    def _makers(self) -> dict[str, Node]:
        """By tensor, once all nodes are written."""
        return {result: node for node in self.nodes for result in node.results}

    @cached_property
    def _readers(self) -> dict[str, list[Node]]:
        """By tensor, once all nodes are written."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.operands):
                found.setdefault(name, []).append(node)
        return found

    def _only_puts(self, node: Node) -> bool:
        """Whether a node is what the write of a whole tensor leaves beside `overwritten`."""
        if node.op not in ("aten.expand.default", "aten._to_copy.default", "aten.alias.default"):
            return False
        before, after = self.tensors[node.operands[0]], self.tensors[node.results[0]]
        return (before.shape, before.dtype) == (after.shape, after.dtype)

    def _loss(self, outputs: list[str], paths: list[str]) -> str:
        """The output called `loss`, or the only one that can be it."""
        pairs = list(zip(paths, outputs, strict=True))
        found = {p: n for p, n in pairs if self.tensors[n].shape == () and self.tensors[n].differentiable}
        named = [name for path, name in found.items() if path.rpartition(".")[2] == "loss"]
        chosen = [found["loss"]] if "loss" in found else named or list(dict.fromkeys(found.values()))
        if len(chosen) == 1:
            return chosen[0]
        if found:
            raise TraceError(
                f"expected forward to return one loss, found {len(chosen)} scalars that depend on parameters: "
                f"{', '.join(map(_path_text, found))}; return their sum, call one of them 'loss' (in a dict or a "
                "dataclass), or detach what is only shown"
            )
        remedy = 'pass loss_fn=, or mode="inference"'
        if any(self.tensors[name].num_elements == 1 and self.tensors[name].differentiable for name in outputs):
            remedy = "make the loss one that has no dims (loss.squeeze(), loss.mean())"
        elif any(self.tensors[name].shape == () for name in outputs):
            remedy = "return one that follows from the model's parameters without detach(), no_grad or new modules"
        raise TraceError(
            f"expected forward to return a scalar loss that depends on a parameter, "
            f"found {', '.join(self._told(path, name) for path, name in pairs) or 'none'}; {remedy}"
        )

    def _told(self, path: str, name: str) -> str:
        """An output, with the line that makes it."""
        node = self._makers.get(name)
        where = f" at {node.source}" if node is not None and node.source else ""
        return f"{path or name.strip('%')}{list(self.tensors[name].shape)}{where}"


class _FxCall(NamedTuple):
    """What a node says. args, kwargs: in which tensors are called as fx's nodes are. results: shape and dtype of each,
    None for what is no tensor."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    scope: Scope
    source: str
    results: list[tuple[tuple[int, ...], str] | None]


def _looks(value: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Copy:
    """A block that does what another does. scope: of its call. suffix: of names of what is made in it."""

    like: str
    block: str
    scope: Scope
    suffix: str
    scopes: dict[Scope, Scope] = field(default_factory=dict, compare=False)  # those that are known

    def path_of(self, path: str) -> str:
        """What is in this block for what is in the other."""
        return self.block + path.removeprefix(self.like) if path.startswith(self.like + ".") else path

    def scope_of(self, scope: Scope) -> Scope:
        """The module call in this block for one in the other."""
        if scope not in self.scopes:
            paths = [path for path, _ in scope.path]
            inside = scope.path[paths.index(self.like) + 1 :]
            self.scopes[scope] = Scope((*self.scope.path, *((self.path_of(path), kind) for path, kind in inside)))
        return self.scopes[scope]


def _argument(value: Any, call: fx.Node) -> Any:
    """An argument of a node as plain data, in which tensors are called as fx's nodes are."""
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item, call) for item in value)
    if isinstance(value, torch.dtype):
        return Atom("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Atom("device", "rank")
    if isinstance(value, torch.layout):
        return Atom("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Atom("memory_format", str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    raise TraceError(
        f"expected tensors and plain values as arguments of {call.target}, found {type(value).__name__} at\n  "
        f"{node_line(call)}\nRegister it as a tensor of the model (register_buffer), or write it as real numbers."
    )


def _own_backward(marker: Node) -> Node:
    """The operator that a marker stands for."""
    operands, key = marker.args
    if key in HOOKED:
        hook = HOOKED[key]
        return replace(marker, op=HOOK, args=(operands, hook.text, hook.pointwise, hook.linear))
    called = CALLED[key]
    args = (called.function, operands, called.arguments, called.differentiable, called.draws)
    return replace(marker, op=FUNCTION, args=args)


def _path_text(path: str) -> str:
    return f"output {path}" if path.isdigit() else path or "the output"


def _scope(node: fx.Node, prefix: str) -> Scope:
    path = []
    for name, kind in (node.meta.get("nn_module_stack") or {}).values():
        if prefix and not (name + ".").startswith(prefix):
            continue
        class_name = kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__
        path.append((re.sub(r"@\d+$", "", (name + ".").removeprefix(prefix).rstrip(".")), class_name))
    return Scope(tuple(path))


def _source_of_forward(module: nn.Module) -> str:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return source_at((code.co_filename, code.co_firstlineno)) if code else ""
