"""Kinds of operators: what many rows of the table have in common, beside their rules."""

from __future__ import annotations

from autopar.ops import in_bits, saved, views, work, workspace
from autopar.ops.operator import Operator

POINTWISE = Operator()

# rearrangements
VIEW = Operator(work=work.VIEW, saved=saved.nothing, is_view=True)
SAME_ELEMENTS = VIEW.by(passes=saved.all_gradients)
RESHAPE = SAME_ELEMENTS.by(views.reshape, limits=(views.reshape_error,), size="size")
SQUEEZE = SAME_ELEMENTS.by(views.squeeze, limits=(views.squeeze_error,))
SLICE = Operator(work=work.SLICE, saved=saved.nothing, is_view=True)
NO_WORK = Operator(work=work.VIEW, saved=saved.nothing)
COPY = Operator(work=work.COPY, saved=saved.nothing)
WHOLE_COPY = COPY.by(passes=saved.all_gradients)
JOIN = WHOLE_COPY.by(work=work.STRAIGHT_COPY)
MASKED_COPY = Operator(work=work.COPY, saved=saved.indices)

# tensors of its own
CREATION = Operator(work=work.CREATION, creates=True)
FILLED = CREATION.by(saved=saved.nothing, size="size")
LIKE = Operator(work=work.CREATION, saved=saved.nothing)

# products
LINEAR = Operator(work=work.LINEAR, saved=saved.matrices)
PRODUCT = LINEAR.by(work=work.MATMUL)
PLUS_PRODUCT = Operator(work=work.ADDMM, saved=saved.added_matrices)
RECURRENT = Operator(saved=saved.recurrent)
EINSUM = Operator(work=work.EINSUM, saved=saved.einsum_factors)

# along dims
REDUCTION = Operator(work=work.REDUCTION)
SUM_OF_DIMS = REDUCTION.by(saved=saved.nothing, passes=saved.all_gradients)
MEAN = REDUCTION.by(saved=saved.nothing)
EXTREME = REDUCTION.by(saved=saved.operand_and_result)
VARIANCE = REDUCTION.by(saved=saved.operand)
CUMSUM = REDUCTION.by(saved=saved.nothing, workspace=workspace.backward(2))
SOFTMAX = Operator(work=work.SOFTMAX, saved=saved.result)

# by index
LOOKUP = Operator(work=work.LOOKUP, saved=saved.indices)
SCATTER = Operator(work=work.SCATTER, saved=saved.indices)

# point by point
TERMS = Operator(work=work.SUM, saved=saved.nothing)
FACTORS = Operator(saved=saved.factors, saved_on_cpu=saved.with_number(saved.factors), workspace=workspace.product)
QUOTIENT = Operator(saved=saved.quotient, saved_on_cpu=saved.with_number(saved.quotient), workspace=workspace.quotient)
OF_INPUT = Operator(saved=saved.operand)
CLAMP = Operator(saved=saved.operands, in_bits=in_bits.CLAMP)
CURVE = Operator(work=work.TRANSCENDENTAL)
CURVE_OF_INPUT = CURVE.by(saved=saved.operand)
CURVE_OF_RESULT = CURVE.by(saved=saved.result)
