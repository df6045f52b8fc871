"""What proofs start from: equations of the operators, each checked completely at small sizes (see polynomials.py).

Placeholders: ANY for tensors of each sort, AXIS for each axis of each sort, THAT for one of each sort, UNARY and BINARY
for pointwise operators. Sizes are those of well-formed terms; of terms that are not well formed nothing is claimed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

from autopar.errors import PlanError
from autopar.substitute.rules.terms import Rule, Sort
from rulemaking.formed import rule_conditions
from rulemaking.statement import parse_rules

AXIOMS = """
# What an operator is by definition.
linear: linear(x, w) => matmul(x, transpose(w))
affine: affine(x, w, b) => add(linear(x, w), b)
affine-row: affine(b, w, v) => add(linear(b, w), v)
sub-ANY: sub(x, y) => add(x, neg(y))
neg-ANY: neg(x) => scale[-1](x)
conv-affine: conv_affine[?s, ?p, ?d, ?g](i, k, b) => shift_along[channel](conv[?s, ?p, ?d, ?g](i, k), b)
batch-norm: batch_norm[?e](i, g, b, m, v)
  => shift_along[channel](scale_along[channel](i, mul(g, rsqrt[?e](v))), sub(b, mul(m, mul(g, rsqrt[?e](v)))))
scale-columns: scale_along[col](x, b) => mul(x, b)
shift-columns: shift_along[col](x, b) => add(x, b)
sum-rows: sum[row](x) => matmul(ones[1, x.row](), x)
sum-columns: sum[col](x) => matmul(x, ones[x.col, 1]())

# Sums, products and multiples.
add-commutes-ANY: add(x, y) => add(y, x)
add-associates-ANY: add(add(x, y), z) => add(x, add(y, z))
mul-commutes-ANY: mul(x, y) => mul(y, x)
mul-associates-ANY: mul(mul(x, y), z) => mul(x, mul(y, z))
mul-distributes-ANY: mul(x, add(y, z)) => add(mul(x, y), mul(x, z))
scale-scale-ANY: scale[?a](scale[?b](x)) => scale[?c](x) where ?c == ?a * ?b
scale-1-ANY: scale[1](x) => x
scale-add-ANY: scale[?c](add(x, y)) => add(scale[?c](x), scale[?c](y))
scale-mul-ANY: scale[?c](mul(x, y)) => mul(scale[?c](x), y)
relu-relu-ANY: relu(relu(x)) => relu(x)
relu-scale-ANY: relu(scale[?c](x)) => scale[?c](relu(x)) where ?c >= 0
add-row: add(add(x, y), b) => add(add(x, b), y)
add-rows: add(add(x, b), v) => add(x, add(b, v))
add-row-to-both: add(x, y) => add(y, x)
mul-row: mul(add(x, y), b) => add(mul(x, b), mul(y, b))
mul-rows: mul(mul(x, b), v) => mul(x, mul(b, v))
mul-of-added-row: mul(add(x, b), v) => add(mul(x, v), mul(b, v))
scale-row: scale[?c](add(x, b)) => add(scale[?c](x), scale[?c](b))
scale-mul-row: scale[?c](mul(x, b)) => mul(scale[?c](x), b)
scale-mul-of-row: mul(scale[?c](x), b) => mul(x, scale[?c](b))

# Matrix products.
matmul-associates: matmul(matmul(x, y), z) => matmul(x, matmul(y, z))
matmul-add-left: matmul(add(x, y), z) => add(matmul(x, z), matmul(y, z))
matmul-add-right: matmul(x, add(y, z)) => add(matmul(x, y), matmul(x, z))
matmul-scale-left: matmul(scale[?c](x), y) => scale[?c](matmul(x, y))
matmul-scale-right: matmul(x, scale[?c](y)) => scale[?c](matmul(x, y))
matmul-rows: matmul(concat[row](x, y), z) => concat[row](matmul(x, z), matmul(y, z))
matmul-columns: matmul(x, concat[col](y, z)) => concat[col](matmul(x, y), matmul(x, z))
matmul-inner: matmul(concat[col](x1, x2), concat[row](y1, y2)) => add(matmul(x1, y1), matmul(x2, y2))
  where x1.col == y1.row
matmul-eye: matmul(x, eye[x.col]()) => x
eye-matmul: matmul(eye[x.row](), x) => x
linear-of-added-row: linear(add(x, b), w) => add(linear(x, w), linear(b, w))
linear-of-scaled-row: linear(mul(x, b), w) => linear(x, mul(w, b))
linear-to-scaled-row: mul(linear(x, w), b) => linear(x, scale_along[row](w, b))
row-linear-associates: linear(linear(b, w1), w2) => linear(b, matmul(w2, w1))
mean-of-matmul: mean[row](matmul(x, y)) => matmul(mean[row](x), y)
mean-of-matmul-columns: mean[col](matmul(x, y)) => matmul(x, mean[col](y))
mul-row-inside: mul(mul(x, y), b) => mul(x, mul(y, b))
mul-added-rows: mul(x, add(b, v)) => add(mul(x, b), mul(x, v))
matmul-scaled-row: mul(matmul(x, y), b) => matmul(x, mul(y, b))
scale-along-add: scale_along[THAT](add(x, y), b)
  => add(scale_along[THAT](x, b), scale_along[THAT](y, b))
scale-along-scale: scale_along[THAT](scale[?c](x), b) => scale[?c](scale_along[THAT](x, b))
scale-along-of-scale: scale_along[THAT](x, scale[?c](b)) => scale[?c](scale_along[THAT](x, b))
scale-along-of-add: scale_along[THAT](x, add(b, v))
  => add(scale_along[THAT](x, b), scale_along[THAT](x, v))
shift-along-add: shift_along[THAT](add(x, y), b) => add(x, shift_along[THAT](y, b))
mean-of-added-row: mean[row](add(x, b)) => add(mean[row](x), b)

# Transposes.
transpose-transpose: transpose(transpose(x)) => x
transpose-matmul: transpose(matmul(x, y)) => matmul(transpose(y), transpose(x))
transpose-UNARY: transpose(UNARY(x)) => UNARY(transpose(x))
transpose-BINARY: transpose(BINARY(x, y)) => BINARY(transpose(x), transpose(y))
transpose-concat: transpose(concat[row](x, y)) => concat[col](transpose(x), transpose(y))
transpose-eye: transpose(eye[?n]()) => eye[?n]()
transpose-zeros: transpose(zeros[?m, ?n]()) => zeros[?n, ?m]()
transpose-ones: transpose(ones[?m, ?n]()) => ones[?n, ?m]()
add-zeros: add(w, zeros[w.row, w.col]()) => w
mul-zeros: mul(w, zeros[w.row, w.col]()) => zeros[w.row, w.col]()
mul-ones: mul(w, ones[w.row, w.col]()) => w

# Concatenations and parts.
first-concat: first[AXIS, x.AXIS](concat[AXIS](x, y)) => x
second-concat: second[AXIS, x.AXIS](concat[AXIS](x, y)) => y
concat-parts: concat[AXIS](first[AXIS, ?n](x), second[AXIS, ?n](x)) => x
concat-associates: concat[AXIS](concat[AXIS](x, y), z) => concat[AXIS](x, concat[AXIS](y, z))
concat-exchanges: concat[row](concat[col](x1, x2), concat[col](y1, y2))
  => concat[col](concat[row](x1, y1), concat[row](x2, y2)) where x1.col == y1.col
concat-exchanges-images: concat[batch](concat[channel](i1, i2), concat[channel](j1, j2))
  => concat[channel](concat[batch](i1, j1), concat[batch](i2, j2)) where i1.channel == j1.channel
concat-exchanges-kernels: concat[in](concat[out](k1, k2), concat[out](k3, k4))
  => concat[out](concat[in](k1, k3), concat[in](k2, k4)) where k1.out == k3.out
first-of-PART: first[col, ?n](PART[row, ?m](x)) => PART[row, ?m](first[col, ?n](x))
second-of-PART: second[col, ?n](PART[row, ?m](x)) => PART[row, ?m](second[col, ?n](x))
first-first: first[AXIS, ?m](first[AXIS, ?n](x)) => first[AXIS, ?m](x)
second-second: second[AXIS, ?m](second[AXIS, ?n](x)) => second[AXIS, ?l](x) where ?l == ?n + ?m
first-second: first[AXIS, ?n](second[AXIS, ?m](x)) => second[AXIS, ?m](first[AXIS, ?l](x)) where ?l == ?m + ?n
concat-UNARY: UNARY(concat[AXIS](x, y)) => concat[AXIS](UNARY(x), UNARY(y))
concat-BINARY: BINARY(concat[AXIS](x1, x2), concat[AXIS](y1, y2)) => concat[AXIS](BINARY(x1, y1), BINARY(x2, y2))
  where x1.AXIS == y1.AXIS
concat-BINARY-columns-of-row: BINARY(concat[col](x, y), concat[col](b, v)) => concat[col](BINARY(x, b), BINARY(y, v))
  where x.col == b.col
concat-BINARY-rows-of-row: BINARY(concat[row](x, y), b) => concat[row](BINARY(x, b), BINARY(y, b))

# Heads.
merge-split: merge_heads(split_heads[?h](x)) => x
split-merge: split_heads[?h](merge_heads(x)) => x
split-UNARY: split_heads[?h](UNARY(x)) => UNARY(split_heads[?h](x))
split-BINARY: split_heads[?h](BINARY(x, y)) => BINARY(split_heads[?h](x), split_heads[?h](y))
merge-UNARY: merge_heads(UNARY(x)) => UNARY(merge_heads(x))
merge-BINARY: merge_heads(BINARY(x, y)) => BINARY(merge_heads(x), merge_heads(y))
split-concat: split_heads[?h](concat[row](x, y)) => concat[row](split_heads[?h](x), split_heads[?h](y))
split-first: split_heads[?h](first[row, ?n](x)) => first[row, ?n](split_heads[?h](x))
split-second: split_heads[?h](second[row, ?n](x)) => second[row, ?n](split_heads[?h](x))
merge-concat: merge_heads(concat[row](x, y)) => concat[row](merge_heads(x), merge_heads(y))

# Reductions.
sum-add: sum[AXIS](add(x, y)) => add(sum[AXIS](x), sum[AXIS](y))
sum-scale: sum[AXIS](scale[?c](x)) => scale[?c](sum[AXIS](x))
sum-concat: sum[AXIS](concat[AXIS](x, y)) => add(sum[AXIS](x), sum[AXIS](y))
mean-add: mean[AXIS](add(x, y)) => add(mean[AXIS](x), mean[AXIS](y))
mean-scale: mean[AXIS](scale[?c](x)) => scale[?c](mean[AXIS](x))
sum-transpose: transpose(sum[row](x)) => sum[col](transpose(x))
mean-transpose: transpose(mean[row](x)) => mean[col](transpose(x))
max-transpose: transpose(max[row](x)) => max[col](transpose(x))
max-relu: max[AXIS](relu(x)) => relu(max[AXIS](x))

# Convolutions and poolings.
conv-add-left: conv[?s, ?p, ?d, ?g](add(i, j), k) => add(conv[?s, ?p, ?d, ?g](i, k), conv[?s, ?p, ?d, ?g](j, k))
conv-add-right: conv[?s, ?p, ?d, ?g](i, add(k1, k2)) => add(conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2))
conv-scale-left: conv[?s, ?p, ?d, ?g](scale[?c](i), k) => scale[?c](conv[?s, ?p, ?d, ?g](i, k))
conv-scale-right: conv[?s, ?p, ?d, ?g](i, scale[?c](k)) => scale[?c](conv[?s, ?p, ?d, ?g](i, k))
conv-batch: conv[?s, ?p, ?d, ?g](concat[batch](i, j), k)
  => concat[batch](conv[?s, ?p, ?d, ?g](i, k), conv[?s, ?p, ?d, ?g](j, k))
conv-out: conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))
  => concat[channel](conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2)) where ?g == 1
conv-in: conv[?s, ?p, ?d, ?g](concat[channel](i, j), concat[in](k1, k2))
  => add(conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](j, k2)) where ?g == 1, i.channel == k1.in
conv-groups: concat[channel](conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?h](j, k2))
  => conv[?s, ?p, ?d, ?n](concat[channel](i, j), concat[out](k1, k2)) where ?n == ?g + ?h, k1.out * ?h == k2.out * ?g
conv-scale-out: scale_along[channel](conv[?s, ?p, ?d, ?g](i, k), b) => conv[?s, ?p, ?d, ?g](i, scale_along[out](k, b))
along-channels: shift_along[channel](shift_along[channel](i, b), v) => shift_along[channel](i, add(b, v))
along-channels-mul: scale_along[channel](scale_along[channel](i, b), v) => scale_along[channel](i, mul(b, v))
along-channels-both: scale_along[channel](shift_along[channel](i, b), v)
  => shift_along[channel](scale_along[channel](i, v), mul(b, v))
along-channels-concat: shift_along[channel](concat[channel](i, j), concat[col](b, v))
  => concat[channel](shift_along[channel](i, b), shift_along[channel](j, v)) where i.channel == b.col
along-channels-batch: shift_along[channel](concat[batch](i, j), b)
  => concat[batch](shift_along[channel](i, b), shift_along[channel](j, b))
max-pool-channels: max_pool[?s, ?t, ?p](concat[channel](i, j))
  => concat[channel](max_pool[?s, ?t, ?p](i), max_pool[?s, ?t, ?p](j))
max-pool-batch: max_pool[?s, ?t, ?p](concat[batch](i, j))
  => concat[batch](max_pool[?s, ?t, ?p](i), max_pool[?s, ?t, ?p](j))
avg-pool-channels: avg_pool[?s, ?t, ?p](concat[channel](i, j))
  => concat[channel](avg_pool[?s, ?t, ?p](i), avg_pool[?s, ?t, ?p](j))
avg-pool-batch: avg_pool[?s, ?t, ?p](concat[batch](i, j))
  => concat[batch](avg_pool[?s, ?t, ?p](i), avg_pool[?s, ?t, ?p](j))
avg-pool-add: avg_pool[?s, ?t, ?p](add(i, j)) => add(avg_pool[?s, ?t, ?p](i), avg_pool[?s, ?t, ?p](j))
avg-pool-scale: avg_pool[?s, ?t, ?p](scale[?c](i)) => scale[?c](avg_pool[?s, ?t, ?p](i))
max-pool-relu: max_pool[?s, ?t, ?p](relu(i)) => relu(max_pool[?s, ?t, ?p](i)) where ?p == 0

# Dtypes.
cast-own-ANY: cast[?d](x) => x where x.dtype == ?d
cast-wider-ANY: cast[?d](cast[?e](x)) => cast[?d](x) where ?e holds x.dtype
cast-back-ANY: cast[?d](cast[?e](cast[?d](x))) => cast[?d](x) where ?e holds ?d
"""

_PLACEHOLDERS = {
    "ANY": ("matrix", "image", "kernel", "bias"),
    "PART": ("first", "second"),
    "THAT": ("row", "channel", "out"),
    "AXIS": ("row", "col", "channel", "batch", "out", "in", "bias"),
    "UNARY": ("scale[?c]", "neg", "relu", "map[?f]", "cast[?d]"),
    "BINARY": ("add", "sub", "mul"),
}


@lru_cache(maxsize=1)
def axioms() -> tuple[Rule, ...]:
    """Every axiom, its placeholders written out; of products also with plain matrices for some of their stacks."""
    stated = parse_rules(AXIOMS, "axiom", _PLACEHOLDERS)
    return tuple(variant for axiom in stated for variant in (axiom, *_plain_variants(axiom)))


def _plain_variants(axiom: Rule) -> Iterator[Rule]:
    """An axiom of products with weights for some, not all, of its matrices, where that is well formed."""
    names = [name for name, sort in axiom.sorts.items() if sort == "matrix"]
    chosen = [some for count in range(1, len(names)) for some in combinations(names, count)]
    for some in chosen if "matmul(" in str(axiom) else ():
        sorts: dict[str, Sort] = {**axiom.sorts, **dict.fromkeys(some, "weight")}
        variant = replace(axiom, name=f"{axiom.name}-plain-{'-'.join(some)}", sorts=sorts)
        try:
            rule_conditions(variant)
        except PlanError:
            continue
        yield variant


def axioms_digest() -> str:
    """A digest of all axioms: what a proof says it started from."""
    return hashlib.sha256("\n".join(map(str, axioms())).encode()).hexdigest()[:16]
