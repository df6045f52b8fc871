"""What the generator enumerates: a few worlds, each with its tensors, all of matching sizes, and its operators.

Sizes of a world are so that as many operators as possible fit; a rule is then tested at other, uneven sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.substitute.rules.expressions import Symbol
from autopar.substitute.rules.terms import Attribute, Size, Sort, Unknown
from rulemaking.values import Field, Integers, Values

LENGTHS: Mapping[Symbol, int] = {Unknown("l"): 1, Unknown("n"): 2, Unknown("m"): 4, Unknown("o"): 8}
"""Where a length is cut in halves: an unknown for each length that occurs."""

_WINDOW = (Unknown("s"), Unknown("p"), Unknown("d"), Unknown("g"))

_POOL = (Unknown("s"), Unknown("t"), Unknown("p"))


@dataclass(frozen=True)
class World:
    """variables: their sorts and lengths. operators: each with its attributes. attributes: values of the unknowns."""

    name: str
    values: Values
    variables: Mapping[str, tuple[Sort, tuple[int, ...]]]
    operators: Sequence[tuple[str, tuple[Attribute, ...]]]
    attributes: Mapping[Symbol, Any]


def _axes(op: str, *axes: str) -> list[tuple[str, tuple[Attribute, ...]]]:
    return [(op, (axis,)) for axis in axes]


def _plain(*ops: str) -> list[tuple[str, tuple[Attribute, ...]]]:
    return [(op, ()) for op in ops]


_UNARY: list[tuple[str, tuple[Attribute, ...]]] = [
    ("scale", (Unknown("c"),)),
    ("map", (Unknown("f"),)),
    ("relu", ()),
]

_NUMBERS: Mapping[Symbol, Any] = {Unknown("c"): 1009, Unknown("f"): "f", Unknown("h"): 2, **LENGTHS}

WORLDS = (
    World(
        "matrices",
        Integers(),
        {
            **dict.fromkeys("xy", ("matrix", (4, 4))),
            **dict.fromkeys(("w1", "w2"), ("weight", (4, 4))),
            "b": ("vector", (4,)),
        },
        [
            *_plain("linear", "affine", "matmul", "add", "transpose"),
            *_UNARY[:2],
            *(found for op in ("concat", "first", "second") for found in _axes(op, "row", "col")),
        ],
        _NUMBERS,
    ),
    World(
        "images",
        Field(),
        {
            **dict.fromkeys("ij", ("image", (2, 4, 4, 3))),
            **dict.fromkeys(("k1", "k2"), ("kernel", (4, 4, 3, 1))),
            "b": ("vector", (4,)),
        },
        [
            ("conv", _WINDOW),
            ("conv_affine", _WINDOW),
            *_plain("add"),
            _UNARY[0],
            _UNARY[2],
            *_axes("concat", "channel", "batch", "out", "in"),
            *(found for op in ("first", "second") for found in _axes(op, "channel", "out")),
            *_axes("scale_along", "channel", "out"),
            *_axes("shift_along", "channel"),
        ],
        {**_NUMBERS, **dict(zip(_WINDOW, (1, (1, 0), 1, 1), strict=True))},
    ),
    World(
        "heads",
        Integers(),
        dict.fromkeys("xy", ("matrix", (2, 4, 4))),
        [
            *_plain("matmul", "add", "mul", "transpose", "merge_heads"),
            ("split_heads", (Unknown("h"),)),
            *_UNARY[:2],
            *(found for op in ("concat", "first", "second") for found in _axes(op, "row")),
        ],
        _NUMBERS,
    ),
    World(
        "constants",
        Field(),
        {"x": ("matrix", (4, 4)), **dict.fromkeys(("w1", "w2"), ("weight", (4, 4)))},
        [
            *_plain("linear", "matmul", "add", "transpose"),
            _UNARY[0],
            ("eye", (Size("x", "col"),)),
            ("zeros", (Size("w1", "row"), Size("w1", "col"))),
            ("ones", (Size("w1", "row"), Size("w1", "col"))),
            *(found for op in ("sum", "mean") for found in _axes(op, "row", "col")),
        ],
        _NUMBERS,
    ),
    World(
        "pools",
        Field(),
        dict.fromkeys("ij", ("image", (2, 4, 4, 4))),
        [
            *_plain("add", "mul"),
            *_UNARY[1:],
            ("max_pool", _POOL),
            ("avg_pool", _POOL),
            *_axes("concat", "channel", "batch"),
            *(found for op in ("first", "second") for found in _axes(op, "channel", "batch")),
        ],
        {**_NUMBERS, **dict(zip(_POOL, (2, 1, 0), strict=True))},
    ),
)
