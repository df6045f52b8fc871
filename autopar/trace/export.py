"""Calls torch.export so that nothing of the model's meaning is lost, and turns its failures into source lines."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autopar.errors import TraceError
from autopar.trace.data_dependence import data_dependence
from autopar.trace.decompose import decompose
from autopar.trace.dropout import write_out_dropout
from autopar.trace.functions import functions_kept
from autopar.trace.regions import check_markers
from autopar.trace.repeats import FEWEST, AgainError, Repeats

LossFn = Callable[..., torch.Tensor]


class _WithLoss(nn.Module):
    """Runs a model and then its loss, so that both are in one graph."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, num_forward: int | None, loss_names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.num_forward = num_forward
        self.loss_names = loss_names

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.num_forward is not None:
            return self.loss_fn(self.model(*args[: self.num_forward]), *args[self.num_forward :])
        loss_args = [kwargs.pop(name) for name in self.loss_names]
        return self.loss_fn(self.model(**kwargs), *loss_args)


def bind_inputs(
    model: nn.Module, example_inputs: tuple[Any, ...] | dict[str, Any] | torch.Tensor, loss_fn: LossFn | None
) -> tuple[list[str], tuple[Any, ...] | dict[str, Any]]:
    """Names each input as forward (then loss_fn) does. Raises TraceError for what neither can take."""
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (tuple, list, dict)):
        raise TraceError(
            f"expected example_inputs as a tuple or dict of tensors (one global batch), found "
            f"{type(example_inputs).__name__}; pass the inputs of model.forward"
        )
    values = list(example_inputs.values()) if isinstance(example_inputs, dict) else list(example_inputs)
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TraceError(f"expected every example input to be a tensor, found {type(value).__name__}")
    if isinstance(example_inputs, dict):
        return list(example_inputs), dict(example_inputs)
    names = _parameter_names(model.forward)
    if len(values) > len(names) and loss_fn is not None:
        names += [name if name not in names else f"{name}_1" for name in _parameter_names(loss_fn)[1:]]
    names += [f"input_{position}" for position in range(len(names), len(values))]
    return names[: len(values)], tuple(values)


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
    except ValueError:  # a built-in without a signature
        return []


def export(
    model: nn.Module,
    names: list[str],
    bound: tuple[Any, ...] | dict[str, Any],
    loss_fn: LossFn | None,
    mode: str,
    fewest: int = FEWEST,
) -> ExportedProgram:
    """The functional ExportedProgram; `linear`, `scaled_dot_product_attention` and the like stay whole.

    Of blocks that do the same, from `fewest` up, there are markers for all but one (`trace.repeats`). In mode "train"
    what forward returns beside tensors, such as a cache of keys and values, is left out.
    """
    device = next(model.parameters(), torch.empty(0)).device
    distinct = [_like(value, device) for value in (bound.values() if isinstance(bound, dict) else bound)]
    args = () if isinstance(bound, dict) else tuple(distinct)
    kwargs = dict(zip(names, distinct, strict=True)) if isinstance(bound, dict) else {}
    target = model if loss_fn is None else _WithLoss(model, loss_fn, *_split(model, names, bound))
    keeps_loss = mode == "train" and loss_fn is None
    target.training = model.training  # and no module's below: each keeps its own mode
    repeats = Repeats(model, fewest)
    with _quiet(), functions_kept(), _modes_kept(model), _returning_tensors(model) if keeps_loss else nullcontext():
        while True:
            try:
                with repeats.watching():
                    program = _functional(target, args, kwargs)
                    check_markers(program)
                return program
            except AgainError:
                continue
            except TraceError:
                raise
            except Exception as error:
                raise _explain(error) from error


def _functional(target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    program = torch.export.export(target, args, kwargs, strict=False)
    _detach_no_grad_regions(program.graph_module)
    write_out_dropout(program.graph_module)
    return decompose(program)


def _split(model: nn.Module, names: list[str], bound: Any) -> tuple[int | None, list[str]]:
    parameters = inspect.signature(model.forward).parameters
    if isinstance(bound, dict):
        return None, [name for name in names if name not in parameters]
    return min(len(names), len(_parameter_names(model.forward))), []


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of its own for each input: export merges inputs that are one object."""
    if value.device == device:
        return value.detach().clone()
    if device.type == "meta" or value.device.type == "meta":
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value.detach().to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
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
def _returning_tensors(model: nn.Module) -> Iterator[None]:
    """Of a mapping that forward returns, only the tensors: torch.export refuses objects that it does not know."""
    own, was_set = model.forward, model.__dict__.get("forward")

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        if not isinstance(output, Mapping):
            return output
        return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}

    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if was_set is not None:
            model.__dict__["forward"] = was_set


def _detach_no_grad_regions(module: fx.GraphModule) -> None:
    """Inlining a `no_grad` region forgets that no gradient leaves it, so its results are detached explicitly."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, region = node.args[0], getattr(module, node.args[1].target)
        _detach_no_grad_regions(region)
        if enabled:
            continue
        for result in list(node.users):
            with module.graph.inserting_after(result):
                detached = module.graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=lambda user, d=detached: user is not d)
    module.recompile()


def _explain(error: Exception) -> TraceError:
    frame = _user_frame(error)
    where = f"{frame.filename}:{frame.lineno}: {frame.line}" if frame else "unknown source line"
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if "data-dependent" in str(error).lower() or "unbacked" in str(error).lower() or "u0" in str(error):
        return data_dependence(where, reason)
    return TraceError(f"the model cannot be captured as one graph; it stopped at\n  {where}\n{reason}")


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    torch_root = str(Path(torch.__file__).parent)
    own_root = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((torch_root, own_root, "<"))
    ]
    return frames[-1] if frames else None
