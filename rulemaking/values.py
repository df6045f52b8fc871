"""What terms are computed on: integers, a finite field, or doubles that have gradients.

Every operator of the algebra is computed by these methods, written once over the few functions in which numpy and
torch differ. Equality on integers and on a field is exact, so that two terms that differ anywhere are seen to differ.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from autopar.errors import PlanError
from autopar.substitute.rules.terms import Attribute
from rulemaking.shapes import axis_index

PRIME = 1_048_573
"""Modulus of the finite field: products of two elements, summed a million times, fit 63 bits."""

_LOWEST = -(2**40)


class Values:
    """Integers of 64 bits in numpy arrays; subclasses say where other numbers differ."""

    def matmul(self, x: Any, y: Any) -> Any:
        """Matrix product over the last two dims."""
        return self.reduced(x @ y)

    def add(self, x: Any, y: Any) -> Any:
        """Sum, element by element."""
        return self.reduced(x + y)

    def mul(self, x: Any, y: Any) -> Any:
        """Product, element by element."""
        return self.reduced(x * y)

    def reduced(self, x: Any) -> Any:
        """The representative of each element."""
        return x

    def number(self, value: Any) -> Any:
        """The number that a constant stands for."""
        return value

    def transpose(self, x: Any) -> Any:
        """Rows and columns swapped."""
        return x.swapaxes(-1, -2)

    def part(self, axis: Attribute, x: Any, start: int, end: int | None) -> Any:
        """The elements from start to before end along an axis."""
        index: list[Any] = [slice(None)] * x.ndim
        index[axis_index(axis)] = slice(start, end)
        return x[tuple(index)]

    def along(self, axis: Attribute, x: Any, vector: Any) -> Any:
        """A vector shaped to broadcast along one axis of x."""
        lengths = [1] * x.ndim
        lengths[axis_index(axis)] = -1 if vector.shape[0] else 0
        return vector.reshape(lengths)

    def sum(self, axis: Attribute, x: Any) -> Any:
        """Sum along an axis, which is kept with length 1."""
        return self.reduced(x.sum(axis_index(axis), keepdims=True))

    def mean(self, axis: Attribute, x: Any) -> Any:
        """Mean along an axis, which is kept with length 1."""
        return self.mul(self.sum(axis, x), self.inverse(x.shape[axis_index(axis)]))

    def split_heads(self, heads: int, x: Any) -> Any:
        """(…, s, h·d) → (…, h, s, d)."""
        *stack, rows, columns = x.shape
        return x.reshape((*stack, rows, heads, columns // max(heads, 1))).swapaxes(-2, -3)

    def merge_heads(self, x: Any) -> Any:
        """(…, h, s, d) → (…, s, h·d)."""
        *stack, heads, rows, columns = x.shape
        return x.swapaxes(-2, -3).reshape((*stack, rows, heads * columns))

    def conv(self, x: Any, k: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        """Grouped convolution: a product with all windows of the padded images."""
        outputs, inputs, height, width = k.shape
        windows = self.windows(x, (height, width), stride, padding, dilation, 0)
        batch, _, *lengths = windows.shape[:4]
        read = inputs * height * width
        cells = self.moved(windows).reshape((batch, groups, read, math.prod(lengths)))
        weights = k.reshape((groups, outputs // groups, read))
        return self.matmul(weights, cells).reshape((batch, outputs, *lengths))

    def max_pool(self, x: Any, size: Any, stride: Any, padding: Any) -> Any:
        """Maximum of each window; what lies outside the image does not count."""
        windows = self.windows(x, pair(size), stride, padding, 1, _LOWEST)
        return self.largest(windows.reshape((*windows.shape[:4], math.prod(pair(size)))), -1)

    def avg_pool(self, x: Any, size: Any, stride: Any, padding: Any) -> Any:
        """Mean of each window; what lies outside the image counts as zeros."""
        windows = self.windows(x, pair(size), stride, padding, 1, 0)
        total = windows.reshape((*windows.shape[:4], math.prod(pair(size)))).sum(-1)
        return self.mul(self.reduced(total), self.inverse(math.prod(pair(size))))

    def windows(self, x: Any, size: tuple[int, int], stride: Any, padding: Any, dilation: Any, outside: int) -> Any:
        """Every window of padded images: (batch, channel, rows, columns of windows, height, width of a window)."""
        padded = self.padded(x, pair(padding), outside)
        steps, spread = pair(stride), pair(dilation)
        reach = tuple(gap * (length - 1) + 1 for length, gap in zip(size, spread, strict=True))
        every = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
        return every[:, :, :: steps[0], :: steps[1], :: spread[0], :: spread[1]]

    def moved(self, windows: Any) -> Any:
        """Windows with the places inside a window before the windows' own places."""
        return windows.transpose(0, 1, 4, 5, 2, 3)

    def batch_norm(self, epsilon: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any) -> Any:
        """(x - mean) · weight / sqrt(variance + epsilon) + bias, channel by channel."""
        weight, bias, mean, scale = (
            self.along("channel", x, v) for v in (weight, bias, mean, self.rsqrt(epsilon, variance))
        )
        return self.add(self.mul(self.mul(self.add(x, -mean), scale), weight), bias)

    def max(self, axis: Attribute, x: Any) -> Any:
        """Largest element along an axis, which is kept with length 1."""
        return self.largest(x, axis_index(axis), keep=True)

    def rsqrt(self, epsilon: Any, x: Any) -> Any:
        """1 / sqrt(x + epsilon), here any function of both."""
        return self.map(f"rsqrt{epsilon}", x)

    def concat(self, axis: Attribute, x: Any, y: Any) -> Any:
        """x followed by y along an axis."""
        return np.concatenate([x, y], axis_index(axis))

    def padded(self, x: Any, padding: tuple[int, int], outside: int) -> Any:
        """Images with rows and columns of `outside` around them."""
        height, width = padding
        return np.pad(x, ((0, 0), (0, 0), (height, height), (width, width)), constant_values=outside)

    def largest(self, x: Any, dim: int, keep: bool = False) -> Any:
        """Largest element along a dim."""
        return x.max(dim, keepdims=keep)

    def relu(self, x: Any) -> Any:
        """The larger of each element and 0."""
        return np.maximum(x, 0)

    def map(self, function: Any, x: Any) -> Any:
        """Any function of one number, by name: here one that no identity holds of."""
        seed = zlib.crc32(str(function).encode())
        return ((x * (seed | 1) + seed) >> 7 ^ x * 40_503) % 23 - 11

    def cast(self, dtype: Any, x: Any) -> Any:
        """Each element rounded as a dtype of torch rounds it, an integer again."""
        return np.asarray(torch.from_numpy(np.ascontiguousarray(x)).to(torch_dtype(dtype)).to(torch.int64))

    def inverse(self, count: int) -> Any:
        """1 / count. Integers have none: raises PlanError."""
        raise PlanError(f"1 / {count} is not an integer; compute terms with means on a field")

    def full(self, value: int, rows: int, columns: int) -> Any:
        """A matrix of one value."""
        return np.full((rows, columns), value, np.int64)

    def eye(self, rows: int) -> Any:
        """The identity matrix."""
        return np.eye(rows, dtype=np.int64)

    def array(self, shape: Sequence[int], random: np.random.Generator) -> Any:
        """Random elements, some negative."""
        return random.integers(-4, 5, shape)


class Integers(Values):
    """The integers: exact, ordered, without division."""


class Field(Values):
    """The integers modulo a prime: exact, with division; ordered by their representatives of least magnitude."""

    def reduced(self, x: Any) -> Any:
        half = PRIME // 2
        return (x + half) % PRIME - half

    def inverse(self, count: int) -> Any:
        return pow(count, -1, PRIME)

    def array(self, shape: Sequence[int], random: np.random.Generator) -> Any:
        return self.reduced(random.integers(0, PRIME, shape))

    def map(self, function: Any, x: Any) -> Any:
        seed = zlib.crc32(str(function).encode()) % PRIME
        return self.reduced(self.reduced(self.reduced(x * x) * (x + seed)) ^ seed)


class Doubles(Values):
    """Doubles in torch tensors, for gradients."""

    def concat(self, axis: Attribute, x: Any, y: Any) -> Any:
        return torch.cat([x, y], axis_index(axis))

    def windows(self, x: Any, size: tuple[int, int], stride: Any, padding: Any, dilation: Any, outside: int) -> Any:
        found = self.padded(x, pair(padding), outside)
        for dim, (length, step, gap) in enumerate(zip(size, pair(stride), pair(dilation), strict=True)):
            found = found.unfold(2 + dim, gap * (length - 1) + 1, step)
        return found[..., :: pair(dilation)[0], :: pair(dilation)[1]]

    def moved(self, windows: Any) -> Any:
        return windows.permute(0, 1, 4, 5, 2, 3)

    def sum(self, axis: Attribute, x: Any) -> Any:
        return x.sum(axis_index(axis), keepdim=True)

    def padded(self, x: Any, padding: tuple[int, int], outside: int) -> Any:
        height, width = padding
        return torch.nn.functional.pad(x, (width, width, height, height), value=outside)

    def largest(self, x: Any, dim: int, keep: bool = False) -> Any:
        return x.amax(dim, keepdim=keep)

    def relu(self, x: Any) -> Any:
        return x.relu()

    def map(self, function: Any, x: Any) -> Any:
        seed = zlib.crc32(str(function).encode()) % 97 / 97
        return torch.sin(x * (1 + seed) + seed) + seed * x

    def rsqrt(self, epsilon: Any, x: Any) -> Any:
        return (x.abs() + 1 + abs(epsilon)).rsqrt()

    def cast(self, dtype: Any, x: Any) -> Any:
        return x

    def inverse(self, count: int) -> Any:
        return 1 / count

    def full(self, value: int, rows: int, columns: int) -> Any:
        return torch.full((rows, columns), value, dtype=torch.float64)

    def eye(self, rows: int) -> Any:
        return torch.eye(rows, dtype=torch.float64)

    def array(self, shape: Sequence[int], random: np.random.Generator) -> Any:
        return torch.from_numpy(random.standard_normal(shape)).requires_grad_()


def pair(value: Any) -> tuple[int, int]:
    """Height and width of an attribute that may be one number for both."""
    return value if isinstance(value, tuple) else (value, value)


def torch_dtype(name: Any) -> torch.dtype:
    """The dtype of torch with a name. Raises PlanError where there is none."""
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"no dtype {name!r} in torch")
    return found
