"""Rows that a mask leaves, `z[mask]`: values decide how many. What is usually done with them needs no number.

    cross_entropy(z[m], y[m])       →  cross_entropy(z, where(m, y, ignore_index))
    mse_loss(a[m], b[m])            →  where(m, mse_loss(a, b, "none"), 0).sum() / (m.sum() · elements of a row)
    l[m].mean(), l[m].sum()         →  the same of l
    head(x[m]) and the like         →  head(x), row by row, as long as one of the above is the end of it
    ctc_loss(p, y[m], n, m.sum(-1)) →  ctc_loss(p, each sample's targets at the front of its row, n, m.sum(-1))

So `MaskedRows` stands in for such an index, for `masked_select` and for indices by `nonzero`. What is computed for rows
that the mask leaves out is finite, whatever they hold, and meets gradients of zero.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autopar.runtime import ctc
from autopar.trace.data_dependence import data_dependence
from autopar.trace.lines import user_line

_BY_CLASS = ("cross_entropy", "nll_loss")
_BY_ELEMENT = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
               "binary_cross_entropy_with_logits")  # fmt: skip
#: each row by itself, with finite results and gradients wherever operands are
_ROW_BY_ROW = frozenset((
    "add", "sub", "subtract", "rsub", "mul", "multiply", "neg", "negative", "abs", "absolute", "square", "pow", "clamp",
    "clamp_min", "clamp_max", "float", "double", "half", "bfloat16", "long", "to", "type_as", "detach", "clone",
    "contiguous", "relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "linear", "layer_norm", "rms_norm", "eq", "ne",
    "logsigmoid", "elu", "leaky_relu", "mish", "selu", "hardtanh", "hardswish", "relu6", "softsign", "exp", "expm1",
    "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "sign", "round", "floor", "nan_to_num",
    "minimum", "maximum", "zeros_like", "ones_like",
))  # fmt: skip
_WITH_MATRICES = frozenset(("linear", "matmul"))
_ALONG = frozenset(("log_softmax", "softmax", "sum", "mean", "logsumexp", "argmax"))
_OPERATORS = {
    "add": "add", "radd": "add", "sub": "sub", "rsub": "rsub", "mul": "mul", "rmul": "mul", "truediv": "div",
    "neg": "neg", "pow": "pow", "abs": "abs", "eq": "eq", "ne": "ne", "matmul": "matmul", "getitem": "getitem",
    "len": "len", "bool": "bool", "iter": "iter", "lt": "lt", "gt": "gt", "le": "le", "ge": "ge",
    "rtruediv": "rtruediv",
}  # fmt: skip


class MaskedRows:
    """The rows of `data` (N, …) that `mask` (N,) leaves."""

    def __init__(self, data: Tensor, mask: Tensor, origin: Tensor) -> None:
        self.data, self.mask, self.origin = data, mask, origin

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def requires_grad(self) -> bool:
        return self.data.requires_grad

    @property
    def ndim(self) -> int:
        return self.data.dim()

    def dim(self) -> int:
        return self.data.dim()

    def size(self, dim: int | None = None) -> Any:
        if dim is None or dim % self.data.dim() == 0:
            _refuse("size")
        return self.data.size(dim)

    def finite(self) -> Tensor:
        """The data with something in the place of rows that are left out."""
        return torch.where(_beside(self.mask, self.data), self.data, _filler(self.data.dtype))

    def with_data(self, data: Tensor) -> MaskedRows:
        return MaskedRows(data, self.mask, self.origin)

    def reduced(self, reduction: str, over_rows: bool = False) -> Any:
        """Over everything, or over the rows alone."""
        if reduction == "none":
            return self
        kept = torch.where(_beside(self.mask, self.data), self.data, 0)
        total = kept.sum(0) if over_rows else kept.sum()
        if reduction == "sum":
            return total
        return total / (self.mask.sum() * (1 if over_rows else math.prod(self.data.shape[1:])))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(getattr(Tensor, name, None)):
            _refuse(f"the {name}")
        return lambda *args, **kwargs: _call(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", func))
        return _call(_OPERATORS.get(name.strip("_"), name), args, kwargs or {})


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: _call(name, args, {})


for _name, _called in _OPERATORS.items():
    setattr(MaskedRows, f"__{_name}__", _operator(_called))
MaskedRows.__hash__ = object.__hash__  # type: ignore[method-assign]


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator makes of rows."""
    given = (*args, *kwargs.values())
    rows = next((x for x in given if isinstance(x, MaskedRows)), None)
    if rows is None:
        _refuse(f"{name} of a list of such")
    if name == "ctc_loss":
        return _ctc_loss(args, kwargs)
    _check_operands(name, rows, given)
    if name in _BY_CLASS:
        return _loss_by_class(rows, getattr(F, name), args, kwargs)
    if name in _BY_ELEMENT:
        return _loss_by_element(rows, getattr(F, name), args, kwargs)
    if name in ("sum", "mean") and len(args) + len(kwargs) <= 2 and set(kwargs) <= {"dim"}:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim is None or (isinstance(dim, int) and dim % rows.data.dim() == 0):
            return rows.reduced(name, over_rows=dim is not None)
    plain, named = tuple(map(_plain, args)), {key: _plain(value) for key, value in kwargs.items()}
    if name in ("view", "reshape", "flatten", "squeeze", "unsqueeze"):
        return _viewed(rows, name, args[1:], kwargs)
    if name == "getitem":
        return _taken(rows, args[1])
    if name in ("div", "true_divide", "divide") and not isinstance(args[1], MaskedRows):
        return rows.with_data(torch.div(*plain, **named))
    if name == "matmul" and args[0] is rows and isinstance(args[1], Tensor) and args[1].dim() <= 2 <= rows.data.dim():
        return rows.with_data(torch.matmul(*plain))
    if name == "pow" and not (isinstance(args[1], (int, float)) and args[1] >= 1):
        _refuse("such a power")
    along = name in _ALONG and _dims_of(rows, args[1:], kwargs)
    if not along and name not in _ROW_BY_ROW:
        _refuse(name)
    function = next(f for f in (getattr(owner, name, None) for owner in (F, torch, Tensor)) if callable(f))
    return rows.with_data(function(*plain, **named))


def _check_operands(name: str, rows: MaskedRows, given: tuple[Any, ...]) -> None:
    """That nothing meets another row than its own."""
    for other in given:
        if isinstance(other, MaskedRows):
            if not _same(other.origin, rows.origin):
                _refuse(f"{name} of rows that different masks leave")
            if other.data.dim() != rows.data.dim() and name not in _BY_CLASS:
                _refuse(f"{name} of rows of {rows.data.dim() - 1} and of {other.data.dim() - 1} dims")
        elif isinstance(other, Tensor) and other.dim() >= rows.data.dim() and name not in _WITH_MATRICES:
            _refuse(f"{name} of such rows and others")
    if name in _WITH_MATRICES and (given[0] is not rows or sum(isinstance(x, MaskedRows) for x in given) > 1):
        _refuse(f"{name} of such rows as its weights")


def _plain(value: Any) -> Any:
    return value.finite() if isinstance(value, MaskedRows) else value


def _dims_of(rows: MaskedRows, args: Any, kwargs: Any) -> bool:
    """Whether the dims that an operator runs along are none of the rows'."""
    given = kwargs.get("dim", args[0] if args else None)
    dims = given if isinstance(given, (list, tuple)) else [given]
    return all(isinstance(dim, int) and dim % rows.data.dim() != 0 for dim in dims)


def _loss_by_class(rows: MaskedRows, function: Any, args: Any, kwargs: Any) -> Any:
    """Targets of rows that are left out are ignored; of probabilities, their losses are."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, target = given.pop("input"), given.pop("target")
    reduction, ignored = given.pop("reduction", "mean"), given.pop("ignore_index", -100)
    if not isinstance(logits, MaskedRows) or not isinstance(target, MaskedRows):
        _refuse("a loss of rows and others")
    if target.data.is_floating_point():
        spread = function(logits.finite(), target.finite(), reduction="none", **given)
        return rows.with_data(spread).reduced(reduction)
    labels = torch.where(_beside(rows.mask, target.data), target.data, ignored)
    found = function(logits.data, labels, ignore_index=ignored, reduction=reduction, **given)
    return rows.with_data(found) if reduction == "none" else found


def _loss_by_element(rows: MaskedRows, function: Any, args: Any, kwargs: Any) -> Any:
    given = {key: _plain(value) for key, value in kwargs.items() if key not in ("reduction", "size_average", "reduce")}
    if len(args) > 2 and not function.__name__.startswith("binary"):
        _refuse("a loss with arguments by position")
    spread = function(*map(_plain, args), reduction="none", **given)
    return rows.with_data(spread).reduced(kwargs.get("reduction", "mean"))


def _ctc_loss(args: Any, kwargs: Any) -> Any:
    """Of targets one after another, as many of each sample as its mask leaves; what stands behind them is not read."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rows, lengths = given["targets"], given["target_lengths"]
    if not isinstance(rows, MaskedRows) or not isinstance(lengths, Tensor) or rows.origin.dim() != 2:
        _refuse("ctc_loss of them in other places than as the targets of samples")
    if rows.data.dim() != 1 or not any(_same(lengths, rows.origin.sum(dim)) for dim in (-1, 1)):
        _refuse("ctc_loss of targets whose lengths are not their mask's sums of each row")
    first = (~rows.origin).long().argsort(dim=-1, stable=True)
    return F.ctc_loss(**{**given, "targets": rows.finite().view(rows.origin.shape).gather(1, first)})


def _ctc_of_samples(
    own: Any, log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch.ctc_loss by an operator of each sample's loss, whose shape no value decides."""
    if log_probs.dim() != 3 or not isinstance(inputs, Tensor) or not isinstance(lengths, Tensor):
        return own(log_probs, targets, inputs, lengths, blank, reduction, zero_infinity)  # type: ignore[no-any-return]
    losses: Tensor = ctc.ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)
    if reduction == 1:
        return (losses / lengths.clamp_min(1)).mean()
    return losses.sum() if reduction else losses


def _viewed(rows: MaskedRows, name: str, args: Any, kwargs: Any) -> Any:
    """Views that leave rows where they are."""
    if kwargs:
        _refuse(name)
    shape = rows.data.shape
    if name in ("view", "reshape"):
        sizes = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        if not sizes or sizes[0] != -1 or -1 in sizes[1:] or math.prod(sizes[1:]) != math.prod(shape[1:]):
            _refuse(name)
        return rows.with_data(rows.data.reshape(shape[0], *sizes[1:]))
    if name == "flatten":
        if len(shape) > 1 and args[:1] != (1,):
            _refuse(name)
        return rows if len(shape) == 1 else rows.with_data(rows.data.flatten(1))
    if not args or args[0] % (len(shape) + (name == "unsqueeze")) == 0:
        _refuse(name)
    return rows.with_data(getattr(rows.data, name)(*args))


def _taken(rows: MaskedRows, index: Any) -> Any:
    first, *rest = index if isinstance(index, tuple) else (index,)
    if first is Ellipsis and all(isinstance(item, (int, slice)) for item in rest) and len(rest) < rows.data.dim():
        return rows.with_data(rows.data[index])
    if first == slice(None) and all(isinstance(item, (int, slice)) for item in rest):
        return rows.with_data(rows.data[index])
    return _refuse("an index")


def _beside(mask: Tensor, data: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (data.dim() - 1))


def _filler(dtype: torch.dtype) -> Any:
    return 0.5 if dtype.is_floating_point else False if dtype == torch.bool else 0


def _refuse(what: str) -> NoReturn:
    raise data_dependence(
        user_line(sys._getframe(1)),
        "rows that a mask leaves may end in a mean, a sum or a loss (cross_entropy, nll, mse, l1, bce, ctc), for which "
        f"ignore_index and products with the mask stand; found {what}",
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are one, or were made by the same operators of the same tensors."""
    if one is other:
        return True
    mode = get_proxy_mode()
    if mode is None:
        return False
    nodes = [getattr(getattr(get_proxy_slot(x, mode.tracer, None), "proxy", None), "node", None) for x in (one, other)]
    return nodes[0] is not None and _equal(*nodes)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        plain = one.op == other.op == "call_function" and one.target == other.target
        random = plain and torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
        return one is other or (plain and not random and _equal((one.args, one.kwargs), (other.args, other.kwargs)))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    return type(one) is type(other) and bool(one == other)


class _Places:
    """Where a mask is true, by dim `dim` of it (all of them, as torch.nonzero has it, if None)."""

    def __init__(self, mask: Tensor, dim: int | None) -> None:
        self.mask, self.at = mask, dim

    def _flat(self, *args: Any) -> _Places:
        return _Places(self.mask, 0) if self.mask.dim() == 1 else _refuse("where a mask is true")

    squeeze = flatten = view = reshape = ravel = _flat

    def __getitem__(self, index: Any) -> _Places:
        if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
            return _Places(self.mask, index[1])
        return _refuse("where a mask is true")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(f"{name} of where a mask is true")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(f"{getattr(func, '__name__', func)} of where a mask is true")


def _is_mask(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.dtype == torch.bool and value.dim() > 0


def _rows(x: Any, index: Any) -> MaskedRows | None:
    """What an index takes, where it is a mask of the leading dims, and numbers or slices of others."""
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if isinstance(first, _Places):
        places = [item for item in index if isinstance(item, _Places)] if isinstance(index, tuple) else [first]
        mask, rest = first.mask, rest[len(places) - 1 :]
        if [place.at for place in places] != list(range(mask.dim())) or not all(_same(p.mask, mask) for p in places):
            _refuse("an index by where a mask is true")
    elif _is_mask(first):
        mask = first
    else:
        return None
    if not all(isinstance(item, (int, slice)) or item is Ellipsis for item in rest):
        _refuse("an index by a mask and other tensors")
    if tuple(x.shape[: mask.dim()]) != tuple(mask.shape):
        return None
    data = x[(*[slice(None)] * mask.dim(), *rest)] if rest else x
    rows = data.reshape(mask.numel(), *data.shape[mask.dim() :])
    return MaskedRows(rows.clone(), mask.reshape(-1).clone(), mask)  # what is written to them later is not seen


@contextmanager
def rows_kept() -> Iterator[None]:
    """While a model is traced, rows that a mask leaves are `MaskedRows`."""
    own_getitem = Tensor.__getitem__
    functions = {
        name: getattr(torch, name) for name in ("masked_select", "nonzero", "where", "index_select", "ctc_loss")
    }

    def getitem(x: Tensor, index: Any) -> Any:
        found = _rows(x, index)
        return own_getitem(x, index) if found is None else found

    def masked_select(x: Tensor, mask: Tensor, **options: Any) -> Any:
        if not _is_mask(mask) or options:
            return functions["masked_select"](x, mask, **options)
        if mask.dim() < x.dim() or mask.shape != x.shape:
            x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call] # torch's
        return MaskedRows(x.reshape(-1).clone(), mask.reshape(-1).clone(), mask)

    def nonzero(x: Tensor, *args: Any, as_tuple: bool = False, **options: Any) -> Any:
        if not isinstance(x, FakeTensor) or x.dim() == 0 or args or options:
            return functions["nonzero"](x, *args, as_tuple=as_tuple, **options)
        mask = x if x.dtype == torch.bool else x != 0
        return tuple(_Places(mask, dim) for dim in range(mask.dim())) if as_tuple else _Places(mask, None)

    def where(*args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and isinstance(args[0], FakeTensor):
            return nonzero(args[0], as_tuple=True)
        return functions["where"](*args, **options)

    def index_select(x: Tensor, dim: int, index: Any) -> Any:
        if isinstance(index, _Places):
            return x[index] if dim % x.dim() == 0 else _refuse("index_select of another dim")
        return functions["index_select"](x, dim, index)

    def ctc_loss(log_probs: Tensor, targets: Tensor, *args: Any, **options: Any) -> Tensor:
        return _ctc_of_samples(functions["ctc_loss"], log_probs, targets, *args, **options)

    both = {"masked_select": masked_select, "nonzero": nonzero, "index_select": index_select}
    with ExitStack() as stack:
        for owner, others in ((Tensor, {"__getitem__": getitem}), (torch, {"where": where, "ctc_loss": ctc_loss})):
            for name, function in (both | others).items():
                stack.enter_context(mock.patch.object(owner, name, function))
        yield
