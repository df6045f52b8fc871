"""Rules of operators that read or write where index tensors say: index, gather, scatter and their kin.

The dim that is looked up stays whole; every other dim may split, and so may the indices themselves. Writing adds
up only where it *adds*: of two writes to one place that overwrite, one wins, and summands would let several win.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ops import kinds, saved, work
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.ops.patterns import Entry, RuleFunction


def _letters(rank: int, name: str = "d", whole: Callable[[int], bool] = lambda dim: False) -> list[str]:
    return [f"{name.upper() if whole(dim) else name}{dim}" for dim in range(rank)]


def _lookup(call: Call) -> tuple[str, str, str]:
    """Letters of an indexed tensor, of its index tensors (each), and of what `x[indices]` is.

    Index tensors broadcast to one shape, whose dims stand where the indexed dims were when those are neighbours,
    and first when they are not (NumPy's advanced indexing).
    """
    rank = len(call.shape(0))
    given = call.arguments["indices"]
    indexed = [dim for dim, index in enumerate(given) if index is not None]
    shapes = [call.shape(position) for position in call.positions["indices"]]
    broadcast = _letters(max(len(shape) for shape in shapes), "i")
    own = _letters(rank, whole=lambda dim: dim in indexed)
    kept = [letter for dim, letter in enumerate(own) if dim not in indexed]
    start = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    indices = ", ".join(" ".join(broadcast[len(broadcast) - len(shape) :]) for shape in shapes)
    return " ".join(own), indices, " ".join([*kept[:start], *broadcast, *kept[start:]])


def index(call: Call) -> list[AxisRule]:
    """x[i, :, j]: dims that are not indexed, and the dims of the indices; reading is linear."""
    if _reads_masks(call):
        return []
    own, indices, result = _lookup(call)
    return Entry(f"{own}, {indices} -> {result}", "P" + "R" * len(call.positions["indices"]))(call)


def index_put(call: Call) -> list[AxisRule]:
    """x[i, :, j] = values (or +=): dims that are not indexed; where it adds, each rank may add for its indices."""
    if _reads_masks(call):
        return _masked_put(call)
    adds = bool(call.arguments["accumulate"])
    own, indices, written = _lookup(call)
    if not adds:
        indices, written = indices.replace("i", "I"), written.replace("i", "I")
    letters, rank = written.split(), len(call.shape(call.positions["values"][0]))
    if rank > len(letters):
        return []
    values = " ".join(letters[len(letters) - rank :])
    word = "P" + "R" * len(call.positions["indices"]) + "P" if adds else ""
    return Entry(f"{own}, {indices}, {values} -> {own}", word, additive=(0,))(call)


def _reads_masks(call: Call) -> bool:
    """A mask stands for as many indices as it has dims and true elements."""
    masks = ("bool", "uint8")
    return any(call.tensor(position).dtype in masks for position in call.positions.get("indices", ())) or not (
        call.positions.get("indices")
    )


def _masked_put(call: Call) -> list[AxisRule]:
    """x[mask] = one number: the mask splits with the dims that it covers."""
    given = call.arguments["indices"]
    if len(call.node.operands) != 3 or call.shape(2) not in ((), (1,)) or call.tensor(1).dtype != "bool":
        return []
    own = _letters(len(call.shape(0)))
    start = next(dim for dim, index in enumerate(given) if index is not None)
    mask = own[start : start + len(call.shape(1))]
    return Entry(f"{' '.join(own)}, {' '.join(mask)}, {'V' * len(call.shape(2))} -> {' '.join(own)}")(call)


def index_select(call: Call) -> list[AxisRule]:
    """x.index_select(dim, ids): other dims, and the ids."""
    rank = len(call.shape(0))
    dim = call.dim("dim", rank)
    if not rank or len(call.shape(1)) != 1:
        return []
    own = _letters(rank, whole=lambda d: d == dim)
    made = [*own[:dim], "i", *own[dim + 1 :]]
    return Entry(f"{' '.join(own)}, i -> {' '.join(made)}", "PR")(call)


def gather(call: Call) -> list[AxisRule]:
    """Dims where operand and index have the same length; along the gathered dim, the index."""
    rank = len(call.shape(0))
    if not rank or len(call.shape(1)) != rank:
        return []
    own, index_letters = _along(call, [1])
    return Entry(f"{own}, {index_letters} -> {index_letters}", "PR")(call)


def _along(call: Call, others: list[int]) -> tuple[str, str]:
    """Letters of operand 0 and of the index-shaped operands of gather and scatter.

    A dim may split where all have one length, since slices must hold the same rows; along `dim` the index alone.
    """
    rank = len(call.shape(0))
    dim = call.dim("dim", rank)
    lengths = [{call.shape(position)[d] for position in others} for d in range(rank)]
    same = [len(sizes) == 1 for sizes in lengths]
    own = _letters(rank, whole=lambda d: d == dim or not same[d] or lengths[d] != {call.shape(0)[d]})
    index_letters = [("i" if same[d] else "I") if d == dim else own[d] for d in range(rank)]
    return " ".join(own), " ".join(index_letters)


def scatter(adds: Callable[[Call], bool]) -> RuleFunction:
    """x.scatter(dim, index, src or a number): dims where all agree; where it adds, the written dim's index too."""

    def rules(call: Call) -> list[AxisRule]:
        rank, count = len(call.shape(0)), len(call.node.operands)
        others = [position for position in range(1, count) if call.shape(position)]
        if not rank or any(len(call.shape(position)) != rank for position in others) or len(others) != count - 1:
            return []
        own, index_letters = _along(call, others)
        linear = adds(call)
        if not linear:
            index_letters = index_letters.replace("i", "I")
        operands = ", ".join([own, *[index_letters] * len(others)])
        word = ("PRP" if count == 3 else "PR") if linear or _writes_zero(call) else ""
        return Entry(f"{operands} -> {own}", word, additive=(0,))(call)

    return rules


def _writes_zero(call: Call) -> bool:
    """Writing the number 0 is linear, however often a place is written."""
    return "reduce" not in call.arguments and call.arguments.get("value") == 0 and not call.has_tensor("value")


def _never(call: Call) -> bool:
    return False


def _adds_to_own(call: Call) -> bool:
    """scatter_reduce that sums, with what was there."""
    return call.arguments["reduce"] in ("sum", "add") and call.arguments.get("include_self", True) is True


def along_index(adds: bool) -> RuleFunction:
    """index_add, index_copy and index_fill: `x[:, ids] op source`, one list of ids along one dim."""

    def rules(call: Call) -> list[AxisRule]:
        rank, count = len(call.shape(0)), len(call.node.operands)
        if not rank or len(call.shape(1)) != 1:
            return []
        dim = call.dim("dim", rank)
        own = _letters(rank, whole=lambda d: d == dim)
        operands = [" ".join(own), "i" if adds else "I"]
        if count == 3:
            source = [*own[:dim], operands[1], *own[dim + 1 :]] if call.shape(2) else []
            operands.append(" ".join(source))
        word = "PRP" if adds else "PR" if _writes_zero(call) else ""
        return Entry(f"{', '.join(operands)} -> {operands[0]}", word, additive=(0,))(call)

    return rules


def take(call: Call) -> list[AxisRule]:
    """The flat operand stays whole; the index splits."""
    own = " ".join(_letters(len(call.shape(0)), whole=lambda dim: True))
    made = " ".join(_letters(len(call.shape(1)), "i"))
    return Entry(f"{own}, {made} -> {made}", "PR")(call)


def bucketize(call: Call) -> list[AxisRule]:
    """Values split, boundaries do not."""
    if len(call.node.operands) != 2:
        return []
    values = " ".join(_letters(len(call.shape(0))))
    return Entry(f"{values}, B -> {values}")(call)


def searchsorted(call: Call) -> list[AxisRule]:
    """Values split; a sorted sequence of several dims splits with them along all but its last."""
    sequence, values = call.shape(0), call.result_shapes[0]
    if len(call.node.operands) != 2 + call.has_tensor("sorter") or len(call.shape(1)) != len(values):
        return []
    made = _letters(len(values))
    own = ["B"] if len(sequence) == 1 else [*made[:-1], "B"]
    operands = [" ".join(own), " ".join(made), *[" ".join(own)] * call.has_tensor("sorter")]
    return Entry(f"{', '.join(operands)} -> {' '.join(made)}")(call)


def _of_source(rule: saved.SaveRule) -> saved.SaveRule:
    """What is added to keeps its gradient as it is: indices are kept for that of what is added."""
    return saved.where_trained((2,), rule)


INDEXING: dict[str, Operator] = {
    "aten.index.Tensor": kinds.LOOKUP.by(index),
    "aten._unsafe_index.Tensor": Operator(index),
    "aten.index_put.default": kinds.SCATTER.by(index_put),
    "aten._unsafe_index_put.default": Operator(index_put),
    "aten.index_select.default": kinds.LOOKUP.by(index_select),
    "aten.gather.default": kinds.LOOKUP.by(gather, saved=saved.operands),
    "aten.take.default": Operator(take),
    "aten.scatter.src": kinds.SCATTER.by(scatter(_never)),
    "aten.scatter.value": kinds.SCATTER.by(scatter(_never)),
    "aten.scatter.reduce": kinds.SCATTER.by(scatter(lambda call: call.arguments["reduce"] == "add")),
    "aten.scatter.value_reduce": kinds.SCATTER.by(scatter(_never)),
    "aten.scatter_add.default": kinds.SCATTER.by(scatter(lambda call: True), saved=_of_source(saved.indices)),
    "aten.scatter_reduce.two": Operator(scatter(_adds_to_own), work=work.SCATTER),
    "aten.index_add.default": kinds.SCATTER.by(along_index(adds=True), saved=_of_source(saved.added_by_index)),
    "aten.index_copy.default": kinds.SCATTER.by(along_index(adds=False), saved=saved.added_by_index),
    "aten.index_fill.int_Scalar": Operator(along_index(adds=False)),
    "aten.index_fill.int_Tensor": Operator(along_index(adds=False)),
    "aten.index_reduce.default": Operator(along_index(adds=False)),
    "aten.bucketize.Tensor": Operator(bucketize),
    "aten.searchsorted.Tensor": Operator(searchsorted),
    "take_along_dim": kinds.LOOKUP,
}
