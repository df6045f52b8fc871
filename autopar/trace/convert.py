"""ExportedProgram -> Graph: the same operators as plain data, with module scopes, source lines and gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import TraceError
from autopar.ir.graph import Atom, Graph, Node, Ref, Scope, Stored, Tensor
from autopar.trace.data_dependence import data_dependence
from autopar.trace.gradients import differentiable_results

_KINDS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


def convert(program: ExportedProgram, model: nn.Module, names: list[str], *, with_loss: bool, mode: str) -> Graph:
    """Raises TraceError when training is asked for and no scalar loss is returned."""
    return _Converter(program, model, names, with_loss).graph(mode)


class _Converter:
    def __init__(self, program: ExportedProgram, model: nn.Module, names: list[str], with_loss: bool) -> None:
        self.program = program
        self.model = model
        self.prefix = "model." if with_loss else ""
        self.names = names
        self.tensors: dict[str, Tensor] = {}
        self.rename: dict[str, str] = {}  # fx node name -> tensor name
        self.nodes: list[Node] = []

    def graph(self, mode: str) -> Graph:
        tied = tied_names(self.model)
        stored, inputs = self._placeholders(tied)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        outputs, mutations = self._outputs()
        loss = self._loss(outputs) if mode == "train" else None
        return Graph(
            inputs=tuple(inputs),
            stored=tuple(stored),
            nodes=tuple(self.nodes),
            outputs=(loss,) if loss else tuple(outputs),
            tensors=self.tensors,
            loss=loss,
            tied=tied,
            mutations=mutations,
            values={
                name.removeprefix(self.prefix): value
                for name, value in self.program.constants.items()
                if torch.is_tensor(value)
            },
            input_names=tuple(self.names),
            model_name=type(self.model).__name__,
            training=self.model.training,
        )

    def _placeholders(self, tied: dict[str, str]) -> tuple[list[Stored], list[str]]:
        stored: dict[str, Stored] = {}
        inputs: list[str] = []
        flags = {name: p.requires_grad for name, p in self.model.named_parameters(remove_duplicate=False)}
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        for spec in self.program.graph_signature.input_specs:
            fx_name = str(getattr(spec.arg, "name", ""))
            if spec.kind == InputKind.USER_INPUT:
                self.rename[fx_name] = name = self.names[len(inputs)]
                inputs.append(name)
                self._add(name, placeholders[fx_name].meta["val"], False)
                continue
            if spec.kind not in _KINDS:
                raise TraceError(f"expected tensors as model state, found {spec.kind} ({spec.target})")
            target = str(spec.target).removeprefix(self.prefix)
            target = tied.get(target, target)
            name = target
            self.rename[fx_name] = name
            requires_grad = spec.kind == InputKind.PARAMETER and flags[target]
            self._add(name, placeholders[fx_name].meta["val"], requires_grad)
            kind: Any = _KINDS[spec.kind]
            stored[name] = Stored(name, target, kind, requires_grad, spec.persistent is not False)
        return list(stored.values()), inputs

    def _add(self, name: str, value: Any, differentiable: bool) -> None:
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors[name] = Tensor(name, tuple(value.shape), dtype, differentiable)

    def _call(self, node: fx.Node) -> None:
        if str(node.target) == "<built-in function getitem>" or "val" not in node.meta:
            return  # items are named by their producer; what has no value is an assertion
        value = node.meta["val"]
        many = isinstance(value, (tuple, list))
        outputs = self._result_names(node, len(value)) if many else (node.name,)
        args = self._argument(tuple(node.args))
        kwargs = tuple((key, self._argument(item)) for key, item in node.kwargs.items() if key != "pin_memory")
        made = Node(node.name, str(node.target), args, kwargs, outputs, _scope(node, self.prefix), _source(node))
        items = value if many else [value]
        if any(not isinstance(size, int) for item in items if torch.is_tensor(item) for size in item.shape):
            raise data_dependence(_line(node), f"{node.target} makes a shape that values decide")
        flags = differentiable_results(made, [self.tensors[name] for name in made.operands])
        for name, item, differentiable in zip(outputs, items, flags, strict=True):
            if name is not None:
                self.rename[name] = name
                self._add(name, item, differentiable)
        self.nodes.append(made)

    def _result_names(self, node: fx.Node, count: int) -> tuple[str | None, ...]:
        outputs: list[str | None] = [None] * count
        for user in node.users:
            position = int(user.args[1])  # type: ignore[arg-type]
            if outputs[position] is None:
                outputs[position] = user.name
            self.rename[user.name] = outputs[position] or user.name
        return tuple(outputs)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(self.rename[value.name])
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, torch.dtype):
            return Atom("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Atom("device", "rank")
        if isinstance(value, torch.layout):
            return Atom("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return Atom("memory_format", str(value).removeprefix("torch."))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TraceError(f"expected tensors and plain values as operator arguments, found {type(value).__name__}")

    def _outputs(self) -> tuple[list[str], dict[str, str]]:
        outputs, mutations = [], {}
        for spec in self.program.graph_signature.output_specs:
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                nodes = {node.name: node for node in self.program.graph.nodes}
                raise TraceError(
                    f"expected forward to leave its inputs alone, but it writes to {spec.target!r} at\n"
                    f"  {_line(nodes[str(getattr(spec.arg, 'name', ''))])}\nClone the input before writing to it."
                )
            name = self.rename.get(str(getattr(spec.arg, "name", "")))
            if name is None:
                continue  # a constant output such as None
            if spec.kind == OutputKind.BUFFER_MUTATION:
                mutations[str(spec.target).removeprefix(self.prefix)] = name
            elif spec.kind == OutputKind.USER_OUTPUT:
                outputs.append(name)
        return outputs, mutations

    def _loss(self, outputs: list[str]) -> str:
        for name in outputs:
            if self.tensors[name].shape == () and self.tensors[name].differentiable:
                return name
        found = [f"{name}{list(self.tensors[name].shape)}" for name in outputs]
        raise TraceError(
            f"expected forward to return a scalar loss that depends on a parameter, "
            f"found {', '.join(found) or 'none'}; "
            'pass loss_fn=, or mode="inference"'
        )


def tied_names(model: nn.Module) -> dict[str, str]:
    """For each parameter or buffer reachable by several names, the later names -> the first one."""
    first: dict[int, str] = {}
    tied = {}
    for iterator in (model.named_parameters, model.named_buffers):
        for name, value in iterator(remove_duplicate=False):
            kept = first.setdefault(id(value), name)
            if kept != name:
                tied[name] = kept
    return tied


def _scope(node: fx.Node, prefix: str) -> Scope:
    path = []
    for name, kind in (node.meta.get("nn_module_stack") or {}).values():
        if prefix and not (name + ".").startswith(prefix):
            continue
        class_name = kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__
        path.append((re.sub(r"@\d+$", "", (name + ".").removeprefix(prefix).rstrip(".")), class_name))
    return Scope(tuple(path))


def _place(node: fx.Node) -> tuple[str, str, str] | None:
    """File, line number and text of the model's line that made the node."""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n? *([^\n]*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return own[-1] if own else None


def _source(node: fx.Node) -> str:
    place = _place(node)
    return f"{'/'.join(Path(place[0]).parts[-2:])}:{place[1]}" if place else ""


def _line(node: fx.Node) -> str:
    place = _place(node)
    return f"{place[0]}:{place[1]}: {place[2]}" if place else "unknown source line"
