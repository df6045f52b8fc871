"""Hooks on gradients while a model is exported: each becomes an operator whose backward is the hook.

A tensor's hook sees the whole gradient of that tensor, whoever read it and when. So it is called once, on the shape of
a gradient, which writes down what it does as operators of torch (`Hooked`); the exported graph gets a marker; and what
reads the tensor then reads the marker (`place_hooks`). Parameters' hooks that are there before forward runs are placed
when it begins, those of modules where the module is called. A hook that only looks on, that needs values, or that runs
where no graph is (after a gradient is stored), is refused with its line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch import eager_transforms
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn.modules import module as every_module
from torch.utils.hooks import BackwardHook

from autopar.errors import TraceError
from autopar.trace.lines import user_line
from autopar.trace.literals import UnwritableError, written
from autopar.trace.markers import HOOKED, Hooked, hooked, is_everywhere
from autopar.trace.writes import written_by

_MOST_TEXT = 2000
_POINTWISE = ("clone", "detach", "_to_copy", "zeros_like", "ones_like", "full_like", "alias", "lift_fresh_copy")
_LINEAR = ("mul", "neg", "clone", "alias", "detach", "_to_copy", "zeros_like")
_OLD_KIND = "is of the old kind", "Use register_full_backward_hook"

Hooks = Mapping[str, list[Callable[..., Any]]]


def parameter_hooks(model: nn.Module) -> Hooks:
    """Of each parameter that has some, by name. Raises TraceError for hooks that no graph has a place for."""
    found = {}
    for name, parameter in model.named_parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            _refuse(f"parameter {name}", hook, "runs after a gradient is stored", "Do this after train_step")
        if own := list((parameter._backward_hooks or {}).values()):
            found[name] = own
    for path, module in model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            hook = next(iter(module._backward_hooks.values()))
            _refuse(f"module {path or 'model'}", hook, *_OLD_KIND)
    if every_module._global_backward_hooks and not every_module._global_is_full_backward_hook:
        _refuse("every module", next(iter(every_module._global_backward_hooks.values())), *_OLD_KIND)
    return found


@contextmanager
def hooks_kept(model: nn.Module, hooks: Hooks, with_gradients: bool) -> Iterator[None]:
    """Hooks become markers while the model is exported; without gradients they are nothing.

    hooks: of parameters (`parameter_hooks`), by their names.
    """

    def start(module: nn.Module, args: Any) -> None:
        parameters = dict(model.named_parameters())
        for name, own in hooks.items():
            for hook in own:
                _mark(parameters[name], hook, f"parameter {name}")

    saved: Any = torch.autograd.graph.saved_tensors_hooks
    patches = [
        (Tensor, "register_hook", _register if with_gradients else lambda x, hook: _Handle("")),
        (Tensor, "register_post_accumulate_grad_hook", _never),
        (BackwardHook, "setup_input_hook", _before_module if with_gradients else lambda own, args: args),
        (BackwardHook, "setup_output_hook", _after_module if with_gradients else lambda own, output: output),
        (torch.autograd, "grad", _without_backward(torch.autograd.grad)),
        (torch.autograd, "backward", _without_backward(torch.autograd.backward)),
        (eager_transforms, "grad_increment_nesting", _no_derivative),
        (eager_transforms, "jvp_increment_nesting", _no_derivative),
        (torch.autograd.forward_ad, "enter_dual_level", _no_derivative),
        (saved, "__enter__", _no_saved_hooks),
        (saved, "__exit__", lambda *_: None),
    ]
    with ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        if hooks:
            stack.callback(model.register_forward_pre_hook(start).remove)
        yield
    if with_gradients:
        parameter_hooks(model)  # of a kind that is refused, forward may have registered some


def place_hooks(program: ExportedProgram) -> None:
    """What reads a tensor that has a hook reads the hook's marker from now on. Raises TraceError where it cannot."""
    module = program.graph_module
    for part in module.modules():
        inner = part.graph.nodes if part is not module and isinstance(part, fx.GraphModule) else ()
        for mark in filter(is_everywhere, inner):
            _misplaced(mark, "is registered where gradients are off", "Register it outside of torch.no_grad")
    waiting = [node for node in module.graph.nodes if is_everywhere(node)]
    if not waiting:
        return
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for mark in list(waiting):
            _place(module.graph, mark, waiting)
            waiting.remove(mark)
    module.recompile()


def _place(graph: fx.Graph, mark: fx.Node, waiting: list[fx.Node]) -> None:
    """Puts a marker between its tensor and what reads that, but for the markers that wait for their places.

    So the hook that was registered first is the nearest to those who read, and the first to see the gradient.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    operands = cast(list[fx.Node], mark.args[0])
    x, last = operands[0], max(operands, key=order.__getitem__)
    readers = [user for user in x.users if user not in waiting]
    if any(order[reader] < order[last] for reader in readers):
        _misplaced(mark, "reads what is made after its tensor is read", "Register it where the tensor is made")
    if any(x in written_by(user) for user in x.users):
        _misplaced(mark, "is of a tensor that is written to", "Write to a clone")
    if last.op == "placeholder":
        next(node for node in graph.nodes if node.op != "placeholder").prepend(mark)
    else:
        last.append(mark)
    x.replace_all_uses_with(mark, delete_user_cb=lambda user: user in readers)


def _misplaced(mark: fx.Node, what: str, remedy: str) -> NoReturn:
    where = HOOKED[str(mark.args[1])].where
    raise TraceError(f"expected hooks on gradients that fit into the graph, found a {where}, which {what}. {remedy}.")


# in place of torch's own, while a model is exported


class _Handle:
    """What registering returns."""

    def __init__(self, where: str) -> None:
        self.where = where

    def remove(self) -> None:
        raise TraceError(
            f"{self.where}\nexpected a hook that stays, found one that forward removes. Do not register it"
        )


def _register(x: Tensor, hook: Callable[..., Any]) -> _Handle:
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if torch.is_inference_mode_enabled():
        return _Handle("")
    return _Handle(_mark(x, hook, f"a tensor of shape {list(x.shape)}"))


def _never(x: Tensor, hook: Callable[..., Any]) -> NoReturn:
    _refuse(f"a tensor of shape {list(x.shape)}", hook, "runs after a gradient is stored", "Do this after train_step")


def _without_backward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Forward calls no backward pass; torch.func's transforms and this package do."""

    def function(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if str(frame.f_globals.get("__name__")).startswith(("torch._functorch", "autopar.")):
            return own(*args, **kwargs)
        raise TraceError(
            f"expected a forward that computes no gradients, found torch.autograd.{own.__name__} at\n"
            f"  {user_line(frame)}\nWrite the derivative out with torch's operators, or train this model on one device."
        )

    return function


def _no_derivative(*_: Any) -> NoReturn:
    """Before torch begins one: an export that ends inside of it leaves torch unable to begin another."""
    raise TraceError(
        f"expected a forward that computes no gradients, found a derivative of torch.func or torch.autograd.forward_ad "
        f"at\n  {user_line(sys._getframe(1))}\nWrite the derivative out with torch's operators, or train this model on "
        "one device."
    )


def _no_saved_hooks(hooks: Any) -> None:
    if isinstance(hooks, torch.autograd.graph.save_on_cpu):
        return  # where saved tensors wait for the backward pass is the plan's affair
    raise TraceError(
        f"expected tensors that are saved for the backward pass as they are, found saved_tensors_hooks at\n"
        f"  {user_line(sys._getframe(1))}\nLeave them out; what to keep and what to compute again is the plan's choice."
    )


def _before_module(own: BackwardHook, args: Any) -> Any:
    """Hooks that change the gradients of a module's inputs."""
    where = f"module {type(own.module).__name__}"
    own.input_tensors_index = []  # type: ignore[assignment] # torch writes None where it has none
    tensors = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    for hook in reversed(own.user_hooks):
        if len(tensors) != 1 or not torch.is_grad_enabled():
            _refuse(
                where, hook, f"has {len(tensors)} gradients of inputs to look at", "Register it on a tensor instead"
            )
        places = [isinstance(x, Tensor) and x.requires_grad for x in args]

        def of_input(gradient: Tensor, hook: Any = hook, places: list[bool] = places) -> Any:
            return _only(
                hook(own.module, tuple(gradient if here else None for here in places), _UnknownGradients()), places
            )

        args = tuple(_marked(x, of_input, where, hook) if here else x for x, here in zip(args, places, strict=True))
    return args


def _after_module(own: BackwardHook, output: Any) -> Any:
    """Hooks that change the gradient of a module's output before it is used."""
    where = f"module {type(own.module).__name__}"
    for hook in reversed(own.user_pre_hooks):
        if not isinstance(output, Tensor) or not output.requires_grad:
            _refuse(where, hook, "is of a module that returns no tensor with a gradient", "Register it on a tensor")

        def of_output(gradient: Tensor, hook: Any = hook) -> Any:
            return _only(hook(own.module, (gradient,)), [True])

        output = _marked(output, of_output, where, hook)
    return output


def _only(returned: Any, places: list[bool]) -> Any:
    if returned is None:
        return None
    items = returned if isinstance(returned, (tuple, list)) else (returned,)
    return items[places.index(True)]


class _UnknownGradients(tuple[Any, ...]):
    """Stands for the gradients of a module's outputs, which hooks cannot look at here."""

    def __getitem__(self, key: Any) -> NoReturn:
        raise TraceError("it reads the gradient of the module's output")

    def __iter__(self) -> NoReturn:
        raise TraceError("it reads the gradient of the module's output")

    __len__ = __iter__


# what a hook does


def _mark(x: Tensor, hook: Callable[..., Any], of: str) -> str:
    """Leaves a marker of a hook on a tensor, for `place_hooks`; says where it is."""
    constants, key = _key(x, hook, of, hook, everywhere=True)
    hooked([x, *constants], key)
    return HOOKED[key].where


def _marked(x: Tensor, hook: Callable[..., Any], of: str, shown: Callable[..., Any]) -> Tensor:
    """The tensor with the hook."""
    constants, key = _key(x, hook, of, shown, everywhere=False)
    made: Tensor = hooked([x, *constants], key)
    return made


def _key(
    x: Tensor, hook: Callable[..., Any], of: str, shown: Callable[..., Any], everywhere: bool
) -> tuple[list[Tensor], str]:
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        module = _traced(x, hook, of, shown)
    text, constants = _text(module, of, shown)
    is_pointwise, is_linear = _is_pointwise(module, x), _is_linear(module)
    where = f"hook {_name(shown)} on {of}"
    key = repr((text, is_pointwise, is_linear, everywhere))
    HOOKED[key] = Hooked(text, is_pointwise, is_linear, everywhere, where)
    return constants, key


def _traced(x: Tensor, hook: Callable[..., Any], of: str, shown: Callable[..., Any]) -> fx.GraphModule:
    """What a hook makes of a gradient; one that it writes to and does not return is returned."""

    def function(gradient: Tensor) -> Tensor:
        returned = hook(gradient)
        return gradient if returned is None else returned

    gradient = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    try:
        with torch.no_grad():
            module: fx.GraphModule = make_fx(torch.func.functionalize(function, remove="mutations"))(gradient)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _refuse(of, shown, f"does what no graph can hold: {reason}", "Use torch.where and the like, or change the loss")
    module.graph.eliminate_dead_code()
    output = next(node for node in module.graph.nodes if node.op == "output").args[0]
    if not isinstance(output, fx.Node) or output.op == "placeholder":
        _refuse(of, shown, "returns no other gradient: it only looks on", "Look at rank.full_gradients() instead")
    if any(torch.Tag.nondeterministic_seeded in n.target.tags for n in module.graph.nodes if n.op == "call_function"):
        _refuse(of, shown, "draws random numbers", "Add noise to the gradients after train_step")
    value = output.meta["val"]
    if value.shape != x.shape or value.dtype != x.dtype:
        _refuse(of, shown, f"returns {value.dtype}{list(value.shape)} for {x.dtype}{list(x.shape)}", "Return its like")
    return module


def _text(module: fx.GraphModule, of: str, shown: Callable[..., Any]) -> tuple[str, list[Tensor]]:
    """As a lambda of the gradient and of other tensors, and these."""
    texts: dict[fx.Node, str] = {}
    constants: list[Tensor] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            texts[node] = "gradient"
        elif node.op == "get_attr":
            texts[node] = f"given_{len(constants)}"
            constants.append(getattr(module, node.target))
        elif node.op == "call_function":
            if not str(node.target).startswith("aten."):
                _refuse(of, shown, f"calls {node.target}", "Use torch's own operators")
            try:
                parts = [_argument(value, texts) for value in node.args]
                parts += [f"{key}={_argument(value, texts)}" for key, value in node.kwargs.items() if value is not None]
            except UnwritableError as error:
                _refuse(of, shown, f"passes {error}", "Use plain values")
            texts[node] = f"{node.target}({', '.join(parts)})"
            if len(texts[node]) > _MOST_TEXT:
                _refuse(of, shown, "does more than fits a line", "Make it an autograd Function in a module of its own")
        else:
            found = texts[node.args[0]]
    names = ", ".join(["gradient", *(f"given_{number}" for number in range(len(constants)))])
    return f"lambda {names}: {found}", constants


def _argument(value: Any, texts: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return texts[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, texts) for item in value)}]"
    return written(value, []).replace("{{", "{").replace("}}", "}")


def _operators(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def operator(node: fx.Node) -> OpOverload:
    """What a call of a graph of ATen operators calls."""
    assert isinstance(node.target, OpOverload)
    return node.target


def _is_pointwise(module: fx.GraphModule, x: Tensor) -> bool:
    """Whether each element of the result is made of the same elements of the gradient and of the others."""
    others = [getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"]
    pointwise = all(
        torch.Tag.pointwise in operator(node).tags or operator(node)._opname in _POINTWISE
        for node in _operators(module)
    )
    return pointwise and all(torch.broadcast_shapes(other.shape, x.shape) == x.shape for other in others)  # type: ignore[no-untyped-call]


def _is_linear(module: fx.GraphModule) -> bool:
    """Whether the hook of a sum is the sum of hooks."""
    of_gradient: set[fx.Node] = {node for node in module.graph.nodes if node.op == "placeholder"}
    for node in _operators(module):
        read = [value for value in node.args if isinstance(value, fx.Node) and value in of_gradient]
        if not read:
            continue
        name = operator(node)._opname
        is_scaled = name in _LINEAR and len(read) == 1 and (name == "mul" or node.args[0] is read[0])
        is_divided = name == "div" and read == [node.args[0]] and "rounding_mode" not in node.kwargs
        is_masked = name == "where" and node.args[0] not in of_gradient and len(read) == 2
        if not (is_scaled or is_divided or is_masked or (name in ("add", "sub") and len(read) == 2)):
            return False
        of_gradient.add(node)
    return True


def _name(hook: Callable[..., Any]) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _refuse(of: str, hook: Callable[..., Any], what: str, remedy: str) -> NoReturn:
    raise TraceError(f"expected hooks on gradients that are a part of the graph, found {_name(hook)} on {of}, which "
                     f"{what}. {remedy}.")  # fmt: skip
