"""Calls torch.export so that nothing of the model's meaning is lost, and turns its failures into source lines."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._export.config
import torch.export._trace
from torch import fx, nn
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from autopar.errors import TraceError
from autopar.ir.faults import is_fault
from autopar.trace.assignments import assignments_kept
from autopar.trace.checks import checks_passed
from autopar.trace.conversions import conversions_passed
from autopar.trace.data_dependence import data_dependence
from autopar.trace.decompose import StridedError, decompose
from autopar.trace.deferred import code_deferred
from autopar.trace.dropout import write_out_dropout
from autopar.trace.functions import functions_kept
from autopar.trace.hooks import Hooks, hooks_kept, place_hooks
from autopar.trace.joined import decomposed_as_one
from autopar.trace.lines import innermost, line_at, node_line, places_in
from autopar.trace.losses import loss_module, name_of_loss, with_loss
from autopar.trace.model_names import Wrapped, is_wrapped
from autopar.trace.python_state import same_each_time
from autopar.trace.regions import check_markers
from autopar.trace.repeats import FEWEST, AgainError, Repeats
from autopar.trace.rows import rows_kept
from autopar.trace.soft_targets import write_out_soft_targets
from autopar.trace.structure import Namer, filled, left_out, outputs_in, tensors_in
from autopar.trace.writes import WRITTEN_ASIDE, untie_written, writes_kept
from autopar.trace.written_out import functions_written_out

LossFn = Callable[..., torch.Tensor]


class WithLoss(nn.Module):
    """Runs a model and then its loss, so that both are in one graph."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        module = loss_module(model, loss_fn)
        if module is not None:  # its parameters are seen, and are called so
            self.add_module(name_of_loss(model), module)
        self.__dict__["called"], self.__dict__["inputs"] = loss_fn, inputs

    called: LossFn
    inputs: Inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = self.inputs.num_forward
        named = [name for name, _ in self.inputs.arguments]
        loss_args = [*args[count:], *(kwargs[name] for name in named[count:] if name in kwargs)]
        own = {name: kwargs[name] for name in named[:count] if name in kwargs}
        return self.called(self.model(*args[:count], **own), *loss_args)


@dataclass(frozen=True)
class Inputs:
    """What forward, and then the loss, is given: arguments by name, of which the loss gets those from `num_forward` on.

    Iterating gives the tensors in all of it, in order. tree: the arguments as plain data (`Graph.arguments`).
    """

    arguments: tuple[tuple[str, Any], ...]
    is_by_name: bool
    num_forward: int
    tree: tuple[tuple[str, Any], ...]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return tensors_in([value for _, value in self.arguments])

    @property
    def is_plain(self) -> bool:
        """Whether each argument is a tensor."""
        return all(isinstance(value, torch.Tensor) for _, value in self.arguments)

    def filled(self, tensors: Iterable[torch.Tensor]) -> Inputs:
        """The same with other tensors."""
        given = iter(tensors)
        return replace(self, arguments=tuple((name, filled(value, given)) for name, value in self.arguments))

    def of_loss(self) -> list[bool]:
        """Of each tensor, whether it goes to the loss alone."""
        return [n >= self.num_forward for n, (_, value) in enumerate(self.arguments) for _ in tensors_in(value)]

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As arguments of a call."""
        if self.is_by_name:
            return (), dict(self.arguments)
        return tuple(value for _, value in self.arguments), {}


def bind_inputs(model: nn.Module, example_inputs: Any, loss_fn: LossFn | None) -> tuple[list[str], Inputs]:
    """Names each tensor among the inputs, as forward (then loss_fn) names its arguments.

    Raises TraceError for what neither can take.
    """
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if isinstance(example_inputs, Mapping):
        example_inputs = dict(example_inputs)
    if not isinstance(example_inputs, (tuple, list, dict)):
        raise TraceError(
            f"expected example_inputs as a tuple or dict (one global batch), found "
            f"{type(example_inputs).__name__}; pass the inputs of model.forward"
        )
    own = _parameter_names(model.forward)
    if isinstance(example_inputs, dict):
        known = inspect.signature(model.forward).parameters
        takes_all = loss_fn is None or any(item.kind == item.VAR_KEYWORD for item in known.values())
        own = [name for name in example_inputs if takes_all or name in known]
        count = len(own)
        arguments = [(name, example_inputs[name]) for name in (*own, *(n for n in example_inputs if n not in own))]
    else:
        values = list(example_inputs)
        count = len(values) if loss_fn is None else _count_of_forward(model, own, len(values), loss_fn)
        names = own[:count] + [f"input_{position}" for position in range(len(own[:count]), count)]
        if loss_fn is not None:
            names += [name if name not in names else f"{name}_1" for name in _parameter_names(loss_fn)[1:]]
        names += [f"input_{position}" for position in range(len(names), len(values))]
        arguments = list(zip(names, values, strict=False))
    namer = Namer([name for name, _ in arguments])
    tree = tuple((name, namer.tree(value, (name,))) for name, value in arguments)
    if arguments and not namer.names:
        kinds = ", ".join(type(value).__name__ for _, value in arguments)
        raise TraceError(f"expected a tensor among the example inputs, found {kinds}; pass the inputs of model.forward")
    inputs = Inputs(tuple(arguments), isinstance(example_inputs, dict), count, tree)
    return namer.names, inputs


def check_gradients(names: list[str], inputs: Inputs) -> None:
    """Raises TraceError for an input whose gradient is asked for: each rank would have a part of it."""
    for name, value in zip(names, inputs, strict=True):
        if value.requires_grad:
            raise TraceError(
                f"expected inputs that need no gradient, found requires_grad=True for {name!r}, of which each rank "
                "would get a part; detach it, or make it a parameter of the model"
            )


def _count_of_forward(model: nn.Module, own: list[str], count: int, loss_fn: LossFn) -> int:
    """How many of so many inputs forward takes: what it can, but for those that the loss cannot do without."""
    needed = max(0, len(_parameter_names(loss_fn, needed=True)) - 1)
    must = len(_parameter_names(model.forward, needed=True))
    return max(min(len(own), count - needed), min(must, count))


def _parameter_names(function: Callable[..., Any], needed: bool = False) -> list[str]:
    """Of the arguments by position, those without a default alone if `needed`; of a module, those of its forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    function = function.forward if isinstance(function, nn.Module) and needed else function
    try:
        known = inspect.signature(function).parameters
        return [name for name, p in known.items() if p.kind in kinds and not (needed and p.default is not p.empty)]
    except ValueError:  # a built-in without a signature
        return []


def export(
    model: nn.Module, inputs: Inputs, loss_fn: LossFn | None, mode: str, fewest: int = FEWEST,
    hooks: Hooks | None = None,
) -> tuple[ExportedProgram, list[str]]:  # fmt: skip
    """The functional ExportedProgram and the paths of its outputs; `linear`, attention and the like stay whole.

    Of blocks that do the same, from `fewest` up, there are markers for all but one (`trace.repeats`). In mode "train"
    what forward returns beside tensors, such as a cache of keys and values, is left out. hooks: on gradients of
    parameters, by name.
    """
    target, args, kwargs = called(model, inputs, loss_fn)
    target.training = model.training  # and no module's below: each keeps its own mode
    repeats = Repeats(model, sys.maxsize if hooks else fewest)
    left: list[str] = []
    with ExitStack() as stack:
        stack.callback(_warn_of, left)
        whole = with_loss(model, loss_fn)
        for context in (
            _quiet(), code_deferred(), functions_kept(), _modes_kept(model),
            same_each_time(target, args, kwargs, trains=mode == "train"),
            hooks_kept(whole, hooks or {}, with_gradients=mode == "train"),
        ):  # fmt: skip
            stack.enter_context(context)
        aside = stack.enter_context(writes_kept(target))
        stack.enter_context(assignments_kept())
        tensors, paths = stack.enter_context(_flat(target, args, kwargs, mode, left))
        while True:
            try:
                with repeats.watching():
                    program = _functional(target, tensors, {})
                    check_markers(program)
                program.graph_module.meta[WRITTEN_ASIDE] = aside
                return program, paths
            except AgainError:
                continue
            except TraceError:
                raise
            except StridedError as error:
                raise _explain(error) from error
            except Exception as error:
                if is_fault(error) and not _tells_arguments(error):
                    raise
                raise _explain(error) from error


def _warn_of(left: list[str]) -> None:
    if left:
        warnings.warn(
            f"forward returns {' and '.join(left)}, for generating token by token; the program leaves it out "
            "(use_cache=False makes none)",
            stacklevel=2,
        )


def called(
    model: nn.Module, inputs: Inputs, loss_fn: LossFn | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What is exported, the model or that with its loss, and what it is called with, on the model's device."""
    device = next(model.parameters(), torch.empty(0)).device
    args, kwargs = inputs.filled([_like(value, device) for value in inputs]).call()
    if loss_fn is not None:
        return WithLoss(model, loss_fn, inputs), args, kwargs
    return Wrapped(model) if is_wrapped(model) else model, args, kwargs


def _functional(target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    with (
        checks_passed(), rows_kept(), conversions_passed(target), functions_written_out(), _transforms_left(),
        torch._export.config.patch(error_on_lifted_constant_tensors=False),
    ):  # fmt: skip
        program = torch.export.export(target, args, kwargs, strict=False)
        place_hooks(program)
    _check_constants(program)
    _check_scatters(program.graph)
    untie_written(program, target)
    write_out_dropout(program.graph_module)
    write_out_soft_targets(program.graph_module)
    program = decomposed_as_one(program, decompose)
    _check_control_flow(program.graph_module)
    return program


@contextmanager
def _transforms_left() -> Iterator[None]:
    """Leaves torch.vmap where an error in its function ended it: in 2.13 it goes on, for whatever is called next."""
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _check_constants(program: ExportedProgram) -> None:
    """Takes out what torch.vmap leaves behind of products. Raises TraceError where something made while tracing is
    read as if it were a constant: it would have another step's value, and no gradient."""
    graph = program.graph
    strays = [name for name, value in program.constants.items() if isinstance(value, FakeTensor)]
    named = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in graph.find_nodes(op="placeholder"):
        if named.get(node.name) not in strays:
            continue
        for user in list(node.users):
            if not user.users:
                graph.erase_node(user)
        for user in node.users:
            raise TraceError(
                f"expected operators whose operands torch can follow, found {user.target} of a tensor that is made "
                f"inside of a function transform at\n  {node_line(user)}\nWrite what torch.vmap or torch.func is given "
                "there for the whole batch."
            )
        program.constants[named[node.name]] = torch.empty(0)


def _check_scatters(graph: fx.Graph) -> None:
    """Raises TraceError for as_strided_scatter as the model calls it: torch gives one device another gradient than the
    writes in place that it is made of."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default):
        raise TraceError(
            f"expected writes whose gradient torch has, found as_strided_scatter, for which it gives that of other "
            f"elements, at\n  {node_line(node)}\nWrite in place: x = x.clone(); x.as_strided(…).copy_(source)."
        )


def _check_control_flow(module: fx.GraphModule) -> None:
    """Raises TraceError for what calls graphs, and for numbers that come of tensors: a plan has no place for these."""
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise TraceError(
                f"expected operators on tensors, found {node.target}, which calls a function, at\n  {node_line(node)}\n"
                f"Write torch.where, a loop in Python or the operators themselves."
            )
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise TraceError(
                f"expected operators on tensors, found a number that is taken out of a tensor (item(), float()) at\n"
                f"  {node_line(node)}\nCompute with the tensor itself (x / x.abs().max().detach())."
            )


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of its own for each input: export merges inputs that are one object."""
    if value.device == device:
        return value.detach().clone()
    if device.type == "meta" or value.device.type == "meta":
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value.detach().to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings, and without the graphs that it prints where tracing ends: errors are ours to tell."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.export", "torch.fx.experimental", "torch._functorch", "torch._subclasses")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    graph_so_far = mock.patch.object(torch.export._trace, "print", lambda *args, **options: None, create=True)
    try:
        with warnings.catch_warnings(), graph_so_far:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _flat(
    target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, left: list[str]
) -> Iterator[tuple[tuple[torch.Tensor, ...], list[str]]]:
    """The target takes the tensors among its arguments and returns those among its results, whose paths it notes.

    left: takes what else it returns in inference.

    torch.export refuses containers and objects that it does not know; what else forward returns is left out.
    """
    own, was_set = target.forward, target.__dict__.get("forward")
    paths: list[str] = []

    @functools.wraps(own)
    def forward(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        output = own(*filled(args, given), **filled(kwargs, given))
        found = [(path, value) for path, value in outputs_in(output) if isinstance(value, torch.Tensor)]
        if mode != "train":
            left[:] = left_out(output)
        paths[:] = [path for path, _ in found]
        return tuple(value for _, value in found)

    del forward.__wrapped__  # torch would bind the tensors to the own forward's names
    target.__dict__["forward"] = forward
    try:
        yield tuple(tensors_in((args, kwargs))), paths
    finally:
        del target.__dict__["forward"]
        if was_set is not None:
            target.__dict__["forward"] = was_set


def _tells_arguments(error: Exception) -> bool:
    """Whether forward, or the loss, does not take what it was called with."""
    return isinstance(error, TypeError) and bool(re.search(r"\(\) (missing|takes|got) ", str(error)))


def _explain(error: Exception) -> TraceError:
    raised = innermost((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    where = line_at(raised or innermost(places_in(str(error))))  # torch writes it into what stops while a graph is run
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if "data-dependent" in str(error).lower() or "unbacked" in str(error).lower() or "u0" in str(error):
        return data_dependence(where, reason)
    return TraceError(f"the model cannot be captured as one graph; it stopped at\n  {where}\n{reason}")
