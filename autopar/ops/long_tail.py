"""Rules of operators that models use now and then: scans, selections by rank, norms, histograms, solvers, sampling."""

from __future__ import annotations

from collections import Counter

from autopar.ir.placement import P, S
from autopar.ops import kinds, views, workspace
from autopar.ops.call import Call
from autopar.ops.notation import AxisRule
from autopar.ops.operator import Operator
from autopar.ops.patterns import Entry, along_dim, reduction, split_sum


def einsum(call: Call) -> list[AxisRule]:
    """Its own equation is the rule; a letter repeated in one operand (a diagonal) is not split."""
    left, arrow, right = str(call.arguments["equation"]).replace(" ", "").partition("->")
    parts = [_dims(part) for part in left.split(",")]
    counts = Counter(letter for part in parts for letter in part)
    if not arrow:  # letters that stand once, in order, after the dims of "..."
        once = sorted(letter for letter, count in counts.items() if count == 1 and letter != "...")
        result = ["..."] * ("..." in counts) + once
    else:
        result = _dims(right)
    repeated = {letter for part in parts for letter in part if part.count(letter) > 1}
    operands = ", ".join(_text(part, repeated) for part in parts)
    count = len(parts)
    words = " ".join("".join("P" if i == p else "R" for i in range(count)) for p in range(count))
    return Entry(f"{operands} -> {_text(result, repeated)}", words)(call)


def _dims(part: str) -> list[str]:
    letters = list(part.replace("...", "."))
    return ["..." if letter == "." else letter for letter in letters]


def _text(letters: list[str], repeated: set[str]) -> str:
    """In the notation, where case says whether a letter splits: einsum's own case becomes a first letter."""

    def name(letter: str) -> str:
        plain = ("u" if letter.isupper() else "l") + letter.lower()
        return plain.upper() if letter in repeated else plain

    return " ".join(letter if letter == "..." else name(letter) for letter in letters)


def nansum(call: Call) -> list[AxisRule]:
    """As sum; not of summands, where a NaN hides what the other ranks hold."""
    return [*reduction(call), *split_sum(call)]


def vector_norm(call: Call) -> list[AxisRule]:
    """Dims that stay; the norm of order 1 is a sum over those that go."""
    return [*reduction(call), *(split_sum(call) if call.arguments["ord"] == 1 else [])]


def histogram(call: Call) -> list[AxisRule]:
    """Counts add up where the range is given; else it is that of all values."""
    if call.arguments["min"] >= call.arguments["max"]:
        return []
    return [AxisRule((S(dim),), (P,)) for dim, size in enumerate(call.shape(0)) if size > 1]


def repeat(call: Call) -> list[AxisRule]:
    """Dims that are not repeated; `repeat` is linear."""
    times, rank = call.arguments["repeats"], len(call.shape(0))
    lead = len(times) - rank
    return views.dim_map([None if d < lead or times[d] != 1 else d - lead for d in range(len(times))])


def ctc_loss(call: Call) -> list[AxisRule]:
    """Samples, where each has a row of targets of its own."""
    return Entry("T n C, n S, n, n -> n")(call) if len(call.shape(1)) == 2 else []


def view_dtype(call: Call) -> list[AxisRule]:
    """Elements of another size change the length of the last dim."""
    rank = len(call.shape(0))
    same = call.shape(0) == call.result_shapes[0]
    return views.dim_map([d if same or d < rank - 1 else None for d in range(rank)], linear=False)


def view_as_complex(call: Call) -> list[AxisRule]:
    """All dims but the last, which holds real and imaginary part."""
    return views.dim_map(list(range(len(call.shape(0)) - 1)), linear=False)


def view_as_real(call: Call) -> list[AxisRule]:
    """All dims; the new one, of real and imaginary part, is whole."""
    return views.dim_map([*range(len(call.shape(0))), None], linear=False)


def diag_embed(call: Call) -> list[AxisRule]:
    """The last dim becomes the diagonal of two new ones; the others stay in order."""
    rank = len(call.shape(0))
    new = {call.dim("dim1", rank + 1), call.dim("dim2", rank + 1)}
    stay = iter(range(rank - 1))
    return views.dim_map([None if dim in new else next(stay) for dim in range(rank + 1)])


def slice_scatter(call: Call) -> list[AxisRule]:
    """`x[:, a:b] = y`: dims that are not cut; linear in both."""
    rank = len(call.shape(0))
    cut = call.dim("dim", rank)
    return [AxisRule((t, t), (t,)) for t in (P, *(S(dim) for dim in range(rank) if dim != cut))]


def select_scatter(call: Call) -> list[AxisRule]:
    """`x[:, i] = y`: dims that are not selected; linear in both."""
    rank = len(call.shape(0))
    cut = call.dim("dim", rank)
    rules = [AxisRule((S(d), S(d - (d > cut))), (S(d),)) for d in range(rank) if d != cut]
    return [AxisRule((P, P), (P,)), *rules]


def solve_triangular(call: Call) -> list[AxisRule]:
    """Each system on its own: matrices of the batch, and right-hand sides; linear in those."""
    sides = "... M k" if call.arguments["left"] else "... k M"
    return Entry(f"... M N, {sides} -> {sides}", "RP")(call)


LONG_TAIL: dict[str, Operator] = {
    "aten.einsum.default": kinds.EINSUM.by(einsum),
    # along one dim, which stays whole
    "aten.cumprod.default": kinds.REDUCTION.by(along_dim),
    "aten.logcumsumexp.default": Operator(along_dim),
    "aten.cummax.default": Operator(along_dim),
    "aten.cummin.default": Operator(along_dim),
    "aten.sort.stable": kinds.REDUCTION.by(along_dim),
    "autopar.ctc_loss.default": Operator(ctc_loss, needs_elements=True),
    # over dims that go
    "aten.nansum.default": Operator(nansum),
    "aten.linalg_vector_norm.default": kinds.EXTREME.by(vector_norm),
    "aten.var_mean.correction": kinds.VARIANCE.by(reduction),
    "aten.std.correction": kinds.EXTREME.by(reduction),
    "aten.std_mean.correction": kinds.REDUCTION.by(reduction),
    "aten.prod.dim_int": kinds.EXTREME.by(reduction),
    "aten.any.dims": kinds.REDUCTION.by(reduction),
    "aten.all.dims": kinds.REDUCTION.by(reduction),
    "aten.median.dim": Operator(reduction),
    "aten.nanmedian.dim": Operator(reduction),
    "aten.kthvalue.default": Operator(reduction),
    "aten.mode.default": Operator(reduction),
    "aten.histc.default": Operator(histogram),
    # rearrangements
    "aten.view_copy.default": Operator(views.reshape, limits=(views.reshape_error,), size="size"),
    "aten._reshape_copy.default": Operator(views.reshape, limits=(views.reshape_error,), size="size"),
    "aten.view.dtype": kinds.SAME_ELEMENTS.by(view_dtype),
    "aten.view_as_complex.default": Operator(view_as_complex),
    "aten.view_as_real.default": Operator(view_as_real),
    "aten.repeat.default": kinds.COPY.by(repeat),
    "aten.unsafe_split.Tensor": Operator(views.split),
    "aten.unsafe_split_with_sizes.default": Operator(views.split),
    "aten.diag_embed.default": Operator(diag_embed),
    "aten.slice_scatter.default": kinds.COPY.by(slice_scatter),
    "aten.select_scatter.default": kinds.COPY.by(select_scatter),
    # matrices, distances, sampling
    "aten.linalg_solve_triangular.default": Operator(solve_triangular),
    "aten._cdist_forward.default": Operator(Entry("... m D, ... n D -> ... m n")),
    "aten._euclidean_dist.default": Operator(Entry("... m D, ... n D -> ... m n"), workspace=workspace.distances),
    "aten.grid_sampler_2d.default": Operator(Entry("n c X0 X1, n y0 y1 W -> n c y0 y1", "PR")),
    "aten.grid_sampler_3d.default": Operator(Entry("n c X0 X1 X2, n y0 y1 y2 W -> n c y0 y1 y2", "PR")),
    "aten._prelu_kernel.default": Operator(Entry("..., ... -> ...")),
}
