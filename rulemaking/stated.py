"""The rules that are stated by hand: what a compiler of training graphs needs, as people know them.

Letters: x, y, z matrices (stacks); w weights; b, g, m, v vectors; i, j, h images; k kernels. Each is verified as the
generated ones are; nothing here is trusted.
"""

STATED = """
# Parallel products that share an operand become one product, and one becomes several.
merge-linears: linear(x, w1), linear(x, w2)
  => first[col, w1.row](linear(x, concat[row](w1, w2))),
    second[col, w1.row](linear(x, concat[row](w1, w2)))
merge-affines: affine(x, w1, b1), affine(x, w2, b2)
  => first[col, w1.row](affine(x, concat[row](w1, w2), concat[col](b1, b2))),
    second[col, w1.row](affine(x, concat[row](w1, w2), concat[col](b1, b2)))
merge-3-linears: linear(x, w1), linear(x, w2), linear(x, w3)
  => first[col, w1.row](linear(x, concat[row](w1, concat[row](w2, w3)))),
    first[col, w2.row](second[col, w1.row](linear(x, concat[row](w1, concat[row](w2, w3))))),
    second[col, w2.row](second[col, w1.row](linear(x, concat[row](w1, concat[row](w2, w3)))))
merge-3-affines: affine(x, w1, b1), affine(x, w2, b2), affine(x, w3, b3)
  => first[col, w1.row](affine(x, concat[row](w1, concat[row](w2, w3)), concat[col](b1, concat[col](b2, b3)))),
    first[col, w2.row](second[col, w1.row](affine(x, concat[row](w1, concat[row](w2, w3)), concat[col](b1,
      concat[col](b2, b3))))),
    second[col, w2.row](second[col, w1.row](affine(x, concat[row](w1, concat[row](w2, w3)), concat[col](b1,
      concat[col](b2, b3)))))
merge-matmuls: matmul(x, y), matmul(x, z)
  => first[col, y.col](matmul(x, concat[col](y, z))),
    second[col, y.col](matmul(x, concat[col](y, z)))
merge-matmuls-on-the-right: matmul(x, z), matmul(y, z)
  => first[row, x.row](matmul(concat[row](x, y), z)),
    second[row, x.row](matmul(concat[row](x, y), z))
merge-linears-on-the-right: linear(x, w), linear(y, w)
  => first[row, x.row](linear(concat[row](x, y), w)),
    second[row, x.row](linear(concat[row](x, y), w))
merge-affines-on-the-right: affine(x, w, b), affine(y, w, b)
  => first[row, x.row](affine(concat[row](x, y), w, b)),
    second[row, x.row](affine(concat[row](x, y), w, b))
split-linear: first[col, ?n](linear(x, w)), second[col, ?n](linear(x, w))
  => linear(x, first[row, ?n](w)),
    linear(x, second[row, ?n](w))
split-affine: first[col, ?n](affine(x, w, b)), second[col, ?n](affine(x, w, b))
  => affine(x, first[row, ?n](w), first[col, ?n](b)),
    affine(x, second[row, ?n](w), second[col, ?n](b))
first-of-linear: first[col, ?n](linear(x, w)) <=> linear(x, first[row, ?n](w))
second-of-linear: second[col, ?n](linear(x, w)) <=> linear(x, second[row, ?n](w))
first-of-affine: first[col, ?n](affine(x, w, b)) <=> affine(x, first[row, ?n](w), first[col, ?n](b))
second-of-affine: second[col, ?n](affine(x, w, b)) <=> affine(x, second[row, ?n](w), second[col, ?n](b))
first-of-matmul: first[col, ?n](matmul(x, y)) <=> matmul(x, first[col, ?n](y))
second-of-matmul: second[col, ?n](matmul(x, y)) <=> matmul(x, second[col, ?n](y))
first-rows-of-linear: first[row, ?n](linear(x, w)) <=> linear(first[row, ?n](x), w)
second-rows-of-linear: second[row, ?n](linear(x, w)) <=> linear(second[row, ?n](x), w)
first-rows-of-affine: first[row, ?n](affine(x, w, b)) <=> affine(first[row, ?n](x), w, b)
second-rows-of-affine: second[row, ?n](affine(x, w, b)) <=> affine(second[row, ?n](x), w, b)
first-rows-of-matmul: first[row, ?n](matmul(x, y)) <=> matmul(first[row, ?n](x), y)
second-rows-of-matmul: second[row, ?n](matmul(x, y)) <=> matmul(second[row, ?n](x), y)
linear-of-concat-weights: linear(x, concat[row](w1, w2)) <=> concat[col](linear(x, w1), linear(x, w2))
linear-of-concat-rows: linear(concat[row](x, y), w) <=> concat[row](linear(x, w), linear(y, w))
affine-of-concat-weights: affine(x, concat[row](w1, w2), concat[col](b1, b2))
  <=> concat[col](affine(x, w1, b1), affine(x, w2, b2))
affine-of-concat-rows: affine(concat[row](x, y), w, b) <=> concat[row](affine(x, w, b), affine(y, w, b))
matmul-of-concat-cols: matmul(x, concat[col](y, z)) <=> concat[col](matmul(x, y), matmul(x, z))
matmul-of-concat-rows: matmul(concat[row](x, y), z) <=> concat[row](matmul(x, z), matmul(y, z))
linear-of-concat: linear(concat[col](x, y), w)
  => add(linear(x, first[col, x.col](w)), linear(y, second[col, x.col](w)))
add-of-linears: add(linear(x, w1), linear(y, w2)) <=> linear(concat[col](x, y), concat[col](w1, w2))
matmul-of-concat: matmul(concat[col](x, y), z)
  => add(matmul(x, first[row, x.col](z)), matmul(y, second[row, x.col](z)))
add-of-matmuls: add(matmul(x1, y1), matmul(x2, y2)) <=> matmul(concat[col](x1, x2), concat[row](y1, y2))

# Products regrouped and distributed.
linear-after-linear: linear(linear(x, w1), w2) <=> linear(x, matmul(w2, w1))
affine-after-affine: affine(affine(x, w1, b1), w2, b2) => affine(x, matmul(w2, w1), affine(b1, w2, b2))
linear-after-affine: linear(affine(x, w1, b), w2) => affine(x, matmul(w2, w1), linear(b, w2))
affine-after-linear: affine(linear(x, w1), w2, b) <=> affine(x, matmul(w2, w1), b)
matmul-after-matmul: matmul(matmul(x, y), z) <=> matmul(x, matmul(y, z))
linear-after-matmul: linear(matmul(x, y), w) <=> matmul(x, linear(y, w))
add-of-linears-of-one: add(linear(x, w1), linear(x, w2)) <=> linear(x, add(w1, w2))
sub-of-linears-of-one: sub(linear(x, w1), linear(x, w2)) <=> linear(x, sub(w1, w2))
add-of-affine-and-linear: add(affine(x, w1, b), linear(x, w2)) <=> affine(x, add(w1, w2), b)
add-of-affines: add(affine(x, w1, b1), affine(x, w2, b2)) <=> affine(x, add(w1, w2), add(b1, b2))
add-of-linears-by-one: add(linear(x, w), linear(y, w)) <=> linear(add(x, y), w)
sub-of-linears-by-one: sub(linear(x, w), linear(y, w)) <=> linear(sub(x, y), w)
add-of-matmuls-of-one: add(matmul(x, y), matmul(x, z)) <=> matmul(x, add(y, z))
add-of-matmuls-by-one: add(matmul(x, z), matmul(y, z)) <=> matmul(add(x, y), z)
affine-is-linear-and-add: affine(x, w, b) <=> add(linear(x, w), b)
adapter-folded: add(linear(x, w1), linear(linear(x, w2), w3)) <=> linear(x, add(w1, matmul(w3, w2)))
adapter-folded-scaled: add(linear(x, w1), scale[?c](linear(linear(x, w2), w3)))
  <=> linear(x, add(w1, scale[?c](matmul(w3, w2))))
adapter-folded-affine: add(affine(x, w1, b), linear(linear(x, w2), w3)) <=> affine(x, add(w1, matmul(w3, w2)), b)
adapter-folded-affine-scaled: add(affine(x, w1, b), scale[?c](linear(linear(x, w2), w3)))
  <=> affine(x, add(w1, scale[?c](matmul(w3, w2))), b)

# Transposes cancelled, absorbed and pushed.
transpose-twice: transpose(transpose(x)) => x
linear-is-matmul: linear(x, w) <=> matmul(x, transpose(w))
matmul-is-linear: matmul(x, w) <=> linear(x, transpose(w))
transpose-of-matmul: transpose(matmul(x, y)) <=> matmul(transpose(y), transpose(x))
transpose-of-linear: transpose(linear(x, w)) <=> matmul(w, transpose(x))
transpose-of-add: transpose(add(x, y)) <=> add(transpose(x), transpose(y))
transpose-of-sub: transpose(sub(x, y)) <=> sub(transpose(x), transpose(y))
transpose-of-mul: transpose(mul(x, y)) <=> mul(transpose(x), transpose(y))
transpose-of-scale: transpose(scale[?c](x)) <=> scale[?c](transpose(x))
transpose-of-neg: transpose(neg(x)) <=> neg(transpose(x))
transpose-of-relu: transpose(relu(x)) <=> relu(transpose(x))
transpose-of-map: transpose(map[?f](x)) <=> map[?f](transpose(x))
transpose-of-cast: transpose(cast[?d](x)) <=> cast[?d](transpose(x))
transpose-of-concat-rows: transpose(concat[row](x, y)) <=> concat[col](transpose(x), transpose(y))
transpose-of-concat-cols: transpose(concat[col](x, y)) <=> concat[row](transpose(x), transpose(y))
transpose-of-first-rows: transpose(first[row, ?n](x)) <=> first[col, ?n](transpose(x))
transpose-of-first-cols: transpose(first[col, ?n](x)) <=> first[row, ?n](transpose(x))
transpose-of-second-rows: transpose(second[row, ?n](x)) <=> second[col, ?n](transpose(x))
transpose-of-second-cols: transpose(second[col, ?n](x)) <=> second[row, ?n](transpose(x))

# Casts.
cast-to-its-own: cast[?d](x) => x where x.dtype == ?d
cast-of-image-to-its-own: cast[?d](i) => i where i.dtype == ?d
cast-through-wider: cast[?d](cast[?e](x)) => cast[?d](x) where ?e holds x.dtype
cast-of-image-through-wider: cast[?d](cast[?e](i)) => cast[?d](i) where ?e holds i.dtype
cast-there-and-back: cast[?d](cast[?e](cast[?d](x))) => cast[?d](x) where ?e holds ?d
cast-of-image-there-and-back: cast[?d](cast[?e](cast[?d](i))) => cast[?d](i) where ?e holds ?d

# Scales.
scale-by-1: scale[1](x) => x
scale-by-minus-1: scale[-1](x) <=> neg(x)
neg-twice: neg(neg(x)) => x
sub-is-add-of-neg: sub(x, y) <=> add(x, neg(y))
linear-of-scale: linear(scale[?c](x), w) <=> scale[?c](linear(x, w))
linear-of-scaled-weight: linear(x, scale[?c](w)) <=> scale[?c](linear(x, w))
linear-scale-to-weight: linear(scale[?c](x), w) <=> linear(x, scale[?c](w))
affine-scale-to-weight: affine(scale[?c](x), w, b) <=> affine(x, scale[?c](w), b)
scale-of-affine: scale[?c](affine(x, w, b)) <=> affine(x, scale[?c](w), scale[?c](b))
matmul-of-scale: matmul(scale[?c](x), y) <=> scale[?c](matmul(x, y))
matmul-of-scale-on-the-right: matmul(x, scale[?c](y)) <=> scale[?c](matmul(x, y))
matmul-scale-moved: matmul(scale[?c](x), y) <=> matmul(x, scale[?c](y))
linear-of-neg: linear(neg(x), w) <=> neg(linear(x, w))
scale-of-sub: scale[?c](sub(x, y)) <=> sub(scale[?c](x), scale[?c](y))
scale-of-mul: scale[?c](mul(x, y)) <=> mul(scale[?c](x), y)
scale-of-relu: relu(scale[?c](x)) <=> scale[?c](relu(x)) where ?c >= 0
relu-twice: relu(relu(x)) => relu(x)
linear-scaled-by-row: mul(linear(x, w), b) <=> linear(x, scale_along[row](w, b))
linear-of-scaled-by-row: linear(mul(x, b), w) <=> linear(x, mul(w, b))

# Sums and products of elements.
mul-commuted: mul(x, y) => mul(y, x)
add-of-row-regrouped: add(add(x, y), b) <=> add(add(x, b), y)
mul-regrouped: mul(mul(x, y), z) <=> mul(x, mul(y, z))
mul-of-add: mul(x, add(y, z)) <=> add(mul(x, y), mul(x, z))
mul-of-sub: mul(x, sub(y, z)) <=> sub(mul(x, y), mul(x, z))
mul-of-add-by-row: mul(add(x, y), b) <=> add(mul(x, b), mul(y, b))
mul-of-add-of-row: mul(add(x, b), v) <=> add(mul(x, v), mul(b, v))

# Concatenations and parts: cancelled, regrouped, and pointwise operators moved through them.
first-of-concat: first[EVERY_AXIS, x.EVERY_AXIS](concat[EVERY_AXIS](x, y)) => x
second-of-concat: second[EVERY_AXIS, x.EVERY_AXIS](concat[EVERY_AXIS](x, y)) => y
concat-of-parts: concat[EVERY_AXIS](first[EVERY_AXIS, ?n](x), second[EVERY_AXIS, ?n](x)) => x
first-of-first: first[EVERY_AXIS, ?m](first[EVERY_AXIS, ?n](x)) => first[EVERY_AXIS, ?m](x)
second-of-second: second[EVERY_AXIS, ?m](second[EVERY_AXIS, ?n](x)) => second[EVERY_AXIS, ?l](x) where ?l == ?n + ?m
concat-regrouped: concat[EVERY_AXIS](concat[EVERY_AXIS](x, y), z) <=> concat[EVERY_AXIS](x, concat[EVERY_AXIS](y, z))
concat-exchanged: concat[row](concat[col](x1, x2), concat[col](y1, y2))
  <=> concat[col](concat[row](x1, y1), concat[row](x2, y2))
relu-of-concat: relu(concat[AXIS](x, y)) <=> concat[AXIS](relu(x), relu(y))
map-of-concat: map[?f](concat[AXIS](x, y)) <=> concat[AXIS](map[?f](x), map[?f](y))
scale-of-concat: scale[?c](concat[AXIS](x, y)) <=> concat[AXIS](scale[?c](x), scale[?c](y))
cast-of-concat: cast[?d](concat[AXIS](x, y)) <=> concat[AXIS](cast[?d](x), cast[?d](y))
add-of-concats: add(concat[AXIS](x1, x2), concat[AXIS](y1, y2))
  => concat[AXIS](add(x1, y1), add(x2, y2))
  where x1.AXIS == y1.AXIS
mul-of-concats: mul(concat[AXIS](x1, x2), concat[AXIS](y1, y2))
  => concat[AXIS](mul(x1, y1), mul(x2, y2))
  where x1.AXIS == y1.AXIS
concat-of-adds: concat[AXIS](add(x1, y1), add(x2, y2)) => add(concat[AXIS](x1, x2), concat[AXIS](y1, y2))
concat-of-muls: concat[AXIS](mul(x1, y1), mul(x2, y2)) => mul(concat[AXIS](x1, x2), concat[AXIS](y1, y2))
relu-of-first: relu(first[AXIS, ?n](x)) <=> first[AXIS, ?n](relu(x))
relu-of-second: relu(second[AXIS, ?n](x)) <=> second[AXIS, ?n](relu(x))
map-of-first: map[?f](first[AXIS, ?n](x)) <=> first[AXIS, ?n](map[?f](x))
map-of-second: map[?f](second[AXIS, ?n](x)) <=> second[AXIS, ?n](map[?f](x))
scale-of-first: scale[?c](first[AXIS, ?n](x)) <=> first[AXIS, ?n](scale[?c](x))
scale-of-second: scale[?c](second[AXIS, ?n](x)) <=> second[AXIS, ?n](scale[?c](x))
add-of-firsts: add(first[AXIS, ?n](x), first[AXIS, ?n](y)) <=> first[AXIS, ?n](add(x, y))
add-of-seconds: add(second[AXIS, ?n](x), second[AXIS, ?n](y)) <=> second[AXIS, ?n](add(x, y))
mul-of-firsts: mul(first[AXIS, ?n](x), first[AXIS, ?n](y)) <=> first[AXIS, ?n](mul(x, y))
mul-of-seconds: mul(second[AXIS, ?n](x), second[AXIS, ?n](y)) <=> second[AXIS, ?n](mul(x, y))

# Parts along one axis of what is concatenated or cut along another.
concat-of-images-exchanged: concat[batch](concat[channel](i1, i2), concat[channel](j1, j2))
  <=> concat[channel](concat[batch](i1, j1), concat[batch](i2, j2))
concat-of-kernels-exchanged: concat[in](concat[out](k1, k2), concat[out](k3, k4))
  <=> concat[out](concat[in](k1, k3), concat[in](k2, k4))
PART-cols-of-concat-rows: PART[col, ?n](concat[row](x, y)) <=> concat[row](PART[col, ?n](x), PART[col, ?n](y))
PART-rows-of-concat-cols: PART[row, ?n](concat[col](x, y)) <=> concat[col](PART[row, ?n](x), PART[row, ?n](y))
PART-channels-of-concat-batch: PART[channel, ?n](concat[batch](i, j))
  <=> concat[batch](PART[channel, ?n](i), PART[channel, ?n](j))
PART-out-of-concat-in: PART[out, ?n](concat[in](k1, k2)) <=> concat[in](PART[out, ?n](k1), PART[out, ?n](k2))
first-cols-of-PART-rows: first[col, ?n](PART[row, ?m](x)) <=> PART[row, ?m](first[col, ?n](x))
second-cols-of-PART-rows: second[col, ?n](PART[row, ?m](x)) <=> PART[row, ?m](second[col, ?n](x))
first-of-second-CUT_AXIS: first[CUT_AXIS, ?n](second[CUT_AXIS, ?m](x)) => second[CUT_AXIS, ?m](first[CUT_AXIS, ?l](x))
  where ?l == ?m + ?n

# Rows added to, or multiplied with, all rows.
add-of-rows: add(add(x, b), v) <=> add(x, add(b, v))
mul-of-rows: mul(mul(x, b), v) <=> mul(x, mul(b, v))
mul-of-row-regrouped: mul(mul(x, y), b) <=> mul(x, mul(y, b))
mul-of-sum-of-rows: mul(x, add(b, v)) <=> add(mul(x, b), mul(x, v))
scale-of-add-of-row: scale[?c](add(x, b)) <=> add(scale[?c](x), scale[?c](b))
scale-of-mul-by-row: scale[?c](mul(x, b)) <=> mul(scale[?c](x), b)
scale-moved-to-row: mul(scale[?c](x), b) <=> mul(x, scale[?c](b))
matmul-scaled-by-row: mul(matmul(x, y), b) <=> matmul(x, mul(y, b))
BINARY-of-row-of-concat-rows: BINARY(concat[row](x, y), b) <=> concat[row](BINARY(x, b), BINARY(y, b))
BINARY-of-row-of-concat-cols: BINARY(concat[col](x, y), concat[col](b, v)) => concat[col](BINARY(x, b), BINARY(y, v))
  where x.col == b.col
concat-cols-of-BINARY-of-row: concat[col](BINARY(x, b), BINARY(y, v)) => BINARY(concat[col](x, y), concat[col](b, v))
PART-rows-of-BINARY-of-row: PART[row, ?n](BINARY(x, b)) <=> BINARY(PART[row, ?n](x), b)
PART-cols-of-BINARY-of-row: PART[col, ?n](BINARY(x, b)) <=> BINARY(PART[col, ?n](x), PART[col, ?n](b))

# Kernels and rows are added, scaled, concatenated and cut as other tensors are.
add-commuted: add(x, y) => add(y, x)
add-commuted-OTHER: add(x, y) => add(y, x)
add-regrouped: add(add(x, y), z) <=> add(x, add(y, z))
add-regrouped-OTHER: add(add(x, y), z) <=> add(x, add(y, z))
scale-of-add: scale[?c](add(x, y)) <=> add(scale[?c](x), scale[?c](y))
scale-of-add-OTHER: scale[?c](add(x, y)) <=> add(scale[?c](x), scale[?c](y))
scale-of-scale: scale[?a](scale[?b](x)) => scale[?c](x) where ?c == ?a * ?b
scale-of-scale-OTHER: scale[?a](scale[?b](x)) => scale[?c](x) where ?c == ?a * ?b
scale-of-parameters-concat: scale[?c](concat[PARAMETER](x, y)) <=> concat[PARAMETER](scale[?c](x), scale[?c](y))
scale-of-parameters-PART: scale[?c](PART[PARAMETER, ?n](x)) <=> PART[PARAMETER, ?n](scale[?c](x))
add-of-parameters-PART: add(PART[PARAMETER, ?n](x), PART[PARAMETER, ?n](y)) <=> PART[PARAMETER, ?n](add(x, y))
concat-of-parameters-add: concat[PARAMETER](add(x1, y1), add(x2, y2))
  <=> add(concat[PARAMETER](x1, x2), concat[PARAMETER](y1, y2)) where x1.PARAMETER == y1.PARAMETER

# Heads.
merge-of-split-heads: merge_heads(split_heads[?h](x)) => x
split-of-merged-heads: split_heads[?h](merge_heads(x)) => x
split-heads-of-scale: split_heads[?h](scale[?c](x)) <=> scale[?c](split_heads[?h](x))
split-heads-of-map: split_heads[?h](map[?f](x)) <=> map[?f](split_heads[?h](x))
split-heads-of-add: split_heads[?h](add(x, y)) <=> add(split_heads[?h](x), split_heads[?h](y))
split-heads-of-mul: split_heads[?h](mul(x, y)) <=> mul(split_heads[?h](x), split_heads[?h](y))
split-heads-of-cast: split_heads[?h](cast[?d](x)) <=> cast[?d](split_heads[?h](x))
split-heads-of-concat-rows: split_heads[?h](concat[row](x, y)) <=> concat[row](split_heads[?h](x), split_heads[?h](y))
split-heads-of-first-rows: split_heads[?h](first[row, ?n](x)) <=> first[row, ?n](split_heads[?h](x))
split-heads-of-second-rows: split_heads[?h](second[row, ?n](x)) <=> second[row, ?n](split_heads[?h](x))
merge-heads-of-scale: merge_heads(scale[?c](x)) <=> scale[?c](merge_heads(x))
merge-heads-of-add: merge_heads(add(x, y)) <=> add(merge_heads(x), merge_heads(y))

# Reductions.
sum-of-linear: sum[row](linear(x, w)) <=> linear(sum[row](x), w)
mean-of-linear: mean[row](linear(x, w)) <=> linear(mean[row](x), w)
mean-of-affine: mean[row](affine(x, w, b)) <=> affine(mean[row](x), w, b)
sum-of-matmul: sum[row](matmul(x, y)) <=> matmul(sum[row](x), y)
sum-of-matmul-cols: sum[col](matmul(x, y)) <=> matmul(x, sum[col](y))
mean-of-matmul: mean[row](matmul(x, y)) <=> matmul(mean[row](x), y)
mean-of-matmul-cols: mean[col](matmul(x, y)) <=> matmul(x, mean[col](y))
sum-of-linear-cols: sum[col](linear(x, w)) <=> linear(x, sum[row](w))
mean-of-linear-cols: mean[col](linear(x, w)) <=> linear(x, mean[row](w))
sum-of-transpose: sum[col](transpose(x)) <=> transpose(sum[row](x))
mean-of-transpose: mean[col](transpose(x)) <=> transpose(mean[row](x))
sum-of-add: sum[AXIS](add(x, y)) <=> add(sum[AXIS](x), sum[AXIS](y))
mean-of-add: mean[AXIS](add(x, y)) <=> add(mean[AXIS](x), mean[AXIS](y))
sum-of-scale: sum[AXIS](scale[?c](x)) <=> scale[?c](sum[AXIS](x))
mean-of-scale: mean[AXIS](scale[?c](x)) <=> scale[?c](mean[AXIS](x))
sum-of-concat: sum[AXIS](concat[AXIS](x, y)) <=> add(sum[AXIS](x), sum[AXIS](y))

# Convolutions.
merge-convs: conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2)
  => first[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))),
    second[channel, k1.out](conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2)))
  where ?g == 1
merge-conv-affines: conv_affine[?s, ?p, ?d, ?g](i, k1, b1), conv_affine[?s, ?p, ?d, ?g](i, k2, b2)
  => first[channel, k1.out](conv_affine[?s, ?p, ?d, ?g](i, concat[out](k1, k2), concat[col](b1, b2))),
    second[channel, k1.out](conv_affine[?s, ?p, ?d, ?g](i, concat[out](k1, k2), concat[col](b1, b2)))
  where ?g == 1
merge-grouped-convs: conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?h](j, k2)
  => first[channel, k1.out](conv[?s, ?p, ?d, ?n](concat[channel](i, j), concat[out](k1, k2))),
    second[channel, k1.out](conv[?s, ?p, ?d, ?n](concat[channel](i, j), concat[out](k1, k2)))
  where ?n == ?g + ?h, k1.out * ?h == k2.out * ?g
merge-convs-on-the-right: conv[?s, ?p, ?d, ?g](i, k), conv[?s, ?p, ?d, ?g](j, k)
  => first[batch, i.batch](conv[?s, ?p, ?d, ?g](concat[batch](i, j), k)),
    second[batch, i.batch](conv[?s, ?p, ?d, ?g](concat[batch](i, j), k))
split-conv: first[channel, ?n](conv[?s, ?p, ?d, ?g](i, k)), second[channel, ?n](conv[?s, ?p, ?d, ?g](i, k))
  => conv[?s, ?p, ?d, ?g](i, first[out, ?n](k)),
    conv[?s, ?p, ?d, ?g](i, second[out, ?n](k))
  where ?g == 1
first-of-conv: first[channel, ?n](conv[?s, ?p, ?d, ?g](i, k))
  <=> conv[?s, ?p, ?d, ?g](i, first[out, ?n](k))
  where ?g == 1
second-of-conv: second[channel, ?n](conv[?s, ?p, ?d, ?g](i, k))
  <=> conv[?s, ?p, ?d, ?g](i, second[out, ?n](k))
  where ?g == 1
conv-of-concat-batch: conv[?s, ?p, ?d, ?g](concat[batch](i, j), k)
  <=> concat[batch](conv[?s, ?p, ?d, ?g](i, k), conv[?s, ?p, ?d, ?g](j, k))
conv-of-concat-kernels: conv[?s, ?p, ?d, ?g](i, concat[out](k1, k2))
  <=> concat[channel](conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2))
  where ?g == 1
conv-of-concat-channels: conv[?s, ?p, ?d, ?g](concat[channel](i, j), k)
  => add(conv[?s, ?p, ?d, ?g](i, first[in, i.channel](k)), conv[?s, ?p, ?d, ?g](j, second[in, i.channel](k)))
  where ?g == 1
add-of-convs: add(conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](j, k2))
  <=> conv[?s, ?p, ?d, ?g](concat[channel](i, j), concat[in](k1, k2))
  where ?g == 1
add-of-convs-of-one: add(conv[?s, ?p, ?d, ?g](i, k1), conv[?s, ?p, ?d, ?g](i, k2))
  <=> conv[?s, ?p, ?d, ?g](i, add(k1, k2))
add-of-convs-by-one: add(conv[?s, ?p, ?d, ?g](i, k), conv[?s, ?p, ?d, ?g](j, k))
  <=> conv[?s, ?p, ?d, ?g](add(i, j), k)
scale-of-conv: scale[?c](conv[?s, ?p, ?d, ?g](i, k)) <=> conv[?s, ?p, ?d, ?g](i, scale[?c](k))
conv-of-scale: conv[?s, ?p, ?d, ?g](scale[?c](i), k) <=> conv[?s, ?p, ?d, ?g](i, scale[?c](k))
conv-affine-is-conv-and-shift: conv_affine[?s, ?p, ?d, ?g](i, k, b)
  <=> shift_along[channel](conv[?s, ?p, ?d, ?g](i, k), b)
conv-scaled-by-channel: scale_along[channel](conv[?s, ?p, ?d, ?g](i, k), b)
  <=> conv[?s, ?p, ?d, ?g](i, scale_along[out](k, b))
conv-affine-scaled-by-channel: scale_along[channel](conv_affine[?s, ?p, ?d, ?g](i, k, b), v)
  => conv_affine[?s, ?p, ?d, ?g](i, scale_along[out](k, v), mul(b, v))
conv-affine-shifted: shift_along[channel](conv_affine[?s, ?p, ?d, ?g](i, k, b), v)
  => conv_affine[?s, ?p, ?d, ?g](i, k, add(b, v))
batch-norm-is-scale-and-shift-inference: batch_norm[?e](i, g, b, m, v)
  => shift_along[channel](scale_along[channel](i, mul(g, rsqrt[?e](v))), sub(b, mul(m, mul(g, rsqrt[?e](v)))))
batch-norm-after-conv-inference: batch_norm[?e](conv[?s, ?p, ?d, ?g](i, k), g, b, m, v)
  => conv_affine[?s, ?p, ?d, ?g](i, scale_along[out](k, mul(g, rsqrt[?e](v))), sub(b, mul(m, mul(g, rsqrt[?e](v)))))
batch-norm-after-conv-affine-inference: batch_norm[?e](conv_affine[?s, ?p, ?d, ?g](i, k, b1), g, b2, m, v)
  => conv_affine[?s, ?p, ?d, ?g](i, scale_along[out](k, mul(g, rsqrt[?e](v))), add(mul(sub(b1, m), mul(g,
      rsqrt[?e](v))), b2))
max-pool-of-relu: max_pool[?s, ?t, ?p](relu(i)) <=> relu(max_pool[?s, ?t, ?p](i)) where ?p == 0
POOL-of-concat: POOL[?s, ?t, ?p](concat[IMAGE_AXIS](x, y))
  <=> concat[IMAGE_AXIS](POOL[?s, ?t, ?p](x), POOL[?s, ?t, ?p](y))
POOL-of-PART: POOL[?s, ?t, ?p](PART[IMAGE_AXIS, ?n](x)) <=> PART[IMAGE_AXIS, ?n](POOL[?s, ?t, ?p](x))
avg-pool-of-add: avg_pool[?s, ?t, ?p](add(i, j)) <=> add(avg_pool[?s, ?t, ?p](i), avg_pool[?s, ?t, ?p](j))
avg-pool-of-scale: avg_pool[?s, ?t, ?p](scale[?c](i)) <=> scale[?c](avg_pool[?s, ?t, ?p](i))
relu-of-relu-image: relu(relu(i)) => relu(i)

# Constants.
linear-by-eye: linear(x, eye[x.col]()) => x
matmul-by-eye: matmul(x, eye[x.col]()) => x
transpose-of-eye: transpose(eye[?n]()) => eye[?n]()
transpose-of-zeros: transpose(zeros[?m, ?n]()) => zeros[?n, ?m]()
add-of-zeros: add(w, zeros[w.row, w.col]()) => w
mul-by-ones: mul(w, ones[w.row, w.col]()) => w
mul-by-zeros: mul(w, zeros[w.row, w.col]()) => zeros[w.row, w.col]()
"""
