"""What autograd saves of operators of the long tail, after torch's derivatives.yaml: of what is not named here, nor in
a row of its own in the table, all operands and results are taken to be kept."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import Graph, Node
from autopar.ops import saved
from autopar.ops.saved import Extra, Saved, SaveRule, whole_copy

INDEX_BYTES = 8


def kept_of(operands: Iterable[int] = (), results: Iterable[int] = ()) -> SaveRule:
    """Operands and results at these positions, where there are as many; results are positions, which are kept whether
    or not anything reads them."""
    places, made = tuple(operands), tuple(results)

    def rule(node: Node, graph: Graph) -> list[Saved]:
        kept: list[Saved] = [node.operands[place] for place in places if place < len(node.operands)]
        unread = whole_copy(graph.tensors[node.results[0]], INDEX_BYTES)
        return kept + [node.outputs[place] or unread for place in made if place < len(node.outputs)]

    return rule


def chosen(node: Node, graph: Graph) -> list[Saved]:
    """Where the elements were that were chosen along a dim; of all, the input and the one."""
    return kept_of(results=(1,))(node, graph) if len(node.outputs) > 1 else saved.operand_and_result(node, graph)


def factored(node: Node, graph: Graph) -> list[Saved]:
    """Of a determinant: the matrices, their factors and pivots, and the sign."""
    matrix = graph.tensors[node.operands[0]]
    dims = tuple(range(len(matrix.shape) - 1))
    return [
        matrix.name,
        whole_copy(matrix),
        Extra(matrix.name, dims, 4),
        Extra(matrix.name, dims[:-1], matrix.itemsize),
    ]


def divided(node: Node, graph: Graph) -> list[Saved]:
    """Both, of division with a remainder; nothing where it is by a number."""
    return list(node.operands) if len(node.operands) > 1 else []


def between(node: Node, graph: Graph) -> list[Saved]:
    """Both ends and the weight; nothing where that is a number."""
    return list(node.operands) if node.op.endswith(".Tensor") else []


_NOTHING = """
    floor ceil round sign trunc frac positive _conj_physical view_as_complex view_as_real _neg_view _conj
    diag diag_embed diagonal_copy expand_copy view_copy _reshape_copy unsafe_split unsafe_split_with_sizes
    split_with_sizes_copy diagonal_scatter _fft_c2r _fft_c2c upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa
"""
_OPERAND = "_fft_r2c selu square logit nan_to_num atanh softshrink hardshrink nansum"
_OPERANDS = "maximum minimum atan2 xlogy addcdiv grid_sampler_2d grid_sampler_3d linalg_cross _prelu_kernel"
_CHOSEN = "max min sort topk kthvalue median nanmedian mode"

KEPT: dict[str, SaveRule] = {
    **dict.fromkeys(_NOTHING.split(), saved.nothing),
    **dict.fromkeys(_OPERAND.split(), saved.operand),
    **dict.fromkeys(_OPERANDS.split(), saved.operands),
    **dict.fromkeys(_CHOSEN.split(), chosen),
    **dict.fromkeys(("cummax", "cummin"), kept_of((0,), (1,))),
    **dict.fromkeys(("masked_scatter", "index_fill", "_unsafe_index", "_unsafe_index_put"), saved.indices),
    **dict.fromkeys(("fmod", "remainder"), divided),
    "take": saved.operands,
    "_linalg_slogdet": factored,
    "lerp": between,
    "put": saved.added_by_index,
    **dict.fromkeys(("addr", "addbmm", "addcmul"), saved.each_other(1, 2)),
}
"""By name, for all overloads."""
