"""How close operators' predicted times are to those that others measured on GPUs, row by row.

    python -m benchmarks.accuracy.gpu_operators FOLDER_OR_FILE... [--cross-validate] [--output gpu_operators]

Reads tables of the form that `autopar profile --from` reads, whatever rows they hold, and asks the cost model for each
row's operator on the shipped profile of its GPU. With --cross-validate the folder's profiles are made anew without a
fifth of the shapes (by a hash), and those are predicted. Kernels of attention differ by half between softwares: a row
is predicted with the table of its own kernel where the profile has one. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.cost import Profile, node_time_ns
from autopar.errors import ProfileError
from autopar.ir.graph import DTYPE_BYTES, Node, Ref, Tensor
from autopar.ir.placement import Shape
from autopar.profiler import load_profile, profile_names
from autopar.profiler.published.attention import COLUMNS as ATTENTION
from autopar.profiler.published.attention import kernel_of, with_kernel
from autopar.profiler.published.make import is_of, profile_from_folder
from autopar.profiler.published.products import DTYPES, SIZES, is_trusted
from autopar.profiler.published.rows import Row, four_fifths, rows_of, shape_of
from benchmarks.facts import facts, write_record


class Case(NamedTuple):
    """A measured operator: what it is, and what the cost model is asked."""

    family: str
    size: str
    key: tuple[int, ...]
    node: Node
    operands: tuple[Shape, ...]
    result: Shape
    gpu: str
    dtype: str
    software: str
    measured_ns: float
    wanted: tuple[bool, ...] = ()  # operands that a gradient is made of: all
    direction: int = 0
    kernel: str = ""

    def predicted_ns(self, profile: Profile) -> int:
        """The cost model's."""
        tensors = _tensors(self.node, self.dtype, self.wanted)
        return node_time_ns(self.node, self.operands, (self.result,), tensors, profile)[self.direction]


@cache
def _tensors(node: Node, dtype: str, wanted: tuple[bool, ...]) -> Mapping[str, Tensor]:
    flags = dict(zip(node.operands, wanted, strict=False))
    names = (*node.operands, *node.results)
    return {name: Tensor(name, (1,), dtype, flags.get(name, True)) for name in names}


# Rows -------------------------------------------------------------------

LINEAR = Node("y", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",))
GRADIENTS = {"grad_input": (True, False), "grad_weight": (False, True)}


def _attention_node(causal: bool) -> Node:
    operands = (Ref("q"), Ref("k"), Ref("v"))
    return Node("y", "aten.scaled_dot_product_attention.default", operands, (("is_causal", causal),), ("y",))


ATTENTION_NODES = {causal: _attention_node(causal) for causal in (False, True)}


def _measured(row: Row) -> dict[str, Any]:
    dtype = DTYPES.get(row["dtype"], row["dtype"])
    named = {"gpu": row["gpu"], "dtype": dtype, "software": row["software"]}
    return {**named, "measured_ns": 1000 * float(row["time_us"])}


def _product(row: Row) -> Case | None:
    m, n, k = shape = shape_of(row, SIZES)
    size = "m, n, k of 256 or more" if min(shape) >= 256 else "less"
    return Case("products", size, shape, LINEAR, ((m, k), (n, k)), (m, n), **_measured(row))


def _trained_product(row: Row) -> Case | None:
    """Of a layer's three: the gradients are those of a product of other sizes."""
    m, n, k = shape_of(row, SIZES)
    if row["batch"] != "1":
        return None
    family = f"products, {row['role'].replace('_', ' of the ')}"
    if row["role"] == "forward":
        return _product(row)._replace(family=family)  # type: ignore[union-attr] # never None
    rows, features, width = (m, k, n) if row["role"] == "grad_input" else (k, m, n)
    wanted = GRADIENTS[row["role"]]
    shapes = ((rows, width), (features, width)), (rows, features)
    return Case(family, "", (m, n, k), LINEAR, *shapes, wanted=wanted, direction=1, **_measured(row))


def _attention(row: Row) -> Case | None:
    shape = shape_of(row, ATTENTION)
    batch, queries, keys, heads, shared, width, causal = shape
    q, kv = (batch, heads, queries, width), (batch, shared, keys, width)
    size = "above 1 ms" if float(row["time_us"]) > 1000 else "20 µs to 1 ms" if float(row["time_us"]) > 20 else "less"
    family, kernel = f"attention, {'causal' if causal else 'no mask'}", kernel_of(row)
    return Case(family, size, shape, ATTENTION_NODES[bool(causal)], (q, kv, kv), q, kernel=kernel, **_measured(row))


def _trained_attention(row: Row) -> Case | None:
    columns = ("batch", "seq", "heads", "kv_heads", "qk_head_dim", "v_head_dim", "causal")
    batch, length, heads, shared, width, values, causal = shape = shape_of(row, columns)
    q, k, v = ((batch, count, length, wide) for count, wide in ((heads, width), (shared, width), (shared, values)))
    family, node = f"attention, trained, {row['pass']}", ATTENTION_NODES[bool(causal)]
    direction = int(row["pass"] == "backward")
    return Case(family, "", shape, node, (q, k, v), (*q[:3], values), direction=direction, **_measured(row))


#: operators that move bytes and compute little: (name in aten, number of operands)
MOVING = {
    **{op: (f"{op}.Tensor", 2) for op in ("add", "mul", "div")}, "gelu": ("gelu.default", 1),
    "relu": ("relu.default", 1), "tanh": ("tanh.default", 1), "softmax": ("_softmax.default", 1),
    "layer_norm": ("layer_norm.default", 1), "rms_norm": ("rms_norm.default", 1),
}  # fmt: skip
MOVING_NODES = {
    op: Node("y", f"aten.{name}", tuple(Ref(x) for x in "ab"[:count]), (), ("y",))
    for op, (name, count) in MOVING.items()
}


def _moving(row: Row) -> Case | None:
    """Of those that float32 tables have, the small ones time the launch from the host: their class says so."""
    if row["op"] not in MOVING or row["pass"] != "forward":
        return None
    shape, count = shape_of(row, ("rows", "cols")), MOVING[row["op"]][1]
    is_large = shape[0] * shape[1] * DTYPE_BYTES[row["dtype"]] >= 1 << 25
    size = "of 32 MiB or more" if is_large else "less"
    node = MOVING_NODES[row["op"]]
    return Case(f"memory-bound, {row['op']}", size, shape, node, (shape,) * count, shape, **_measured(row))


#: what a row's columns say it is
READERS: tuple[tuple[set[str], Callable[[Row], Case | None]], ...] = (
    ({"role", "layout", *SIZES}, _trained_product),
    ({"pass", "qk_head_dim"}, _trained_attention),
    ({*ATTENTION, "kernel"}, _attention),
    ({"op", "rows", "cols"}, _moving),
    (set(SIZES), _product),
)


def cases_of(rows: Iterable[Row]) -> Iterator[Case]:
    """What the rows measured, as far as it is known here and in a dtype that the cost model has."""
    for row in rows:
        reader = next((reader for columns, reader in READERS if columns <= row.keys()), None)
        if reader is None or DTYPES.get(row["dtype"], row["dtype"]) not in DTYPE_BYTES:
            continue
        if reader is _product and "batch" in row:  # batches of products
            continue
        case = reader(row)
        if case is not None:
            yield case


# Predictions --------------------------------------------------------------


class Predictor:
    """The profiles of GPUs, with the attention of each kernel."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder  # of which profiles are made without a fifth of the shapes; None: as they are shipped
        self._profiles: dict[str, Profile | None] = {}
        self._by_kernel: dict[tuple[str, str], Profile] = {}

    def error(self, case: Case) -> float | None:
        """predicted / measured - 1; None for a GPU without a profile, or a shape that was fitted to."""
        if self.folder and four_fifths(case.key):
            return None
        if case.gpu not in self._profiles:
            self._profiles[case.gpu] = self._profile(case.gpu)
        profile = self._profiles[case.gpu]
        if profile is None:
            return None
        if case.kernel:
            key = case.gpu, case.kernel
            profile = self._by_kernel[key] = self._by_kernel.get(key) or with_kernel(profile, case.kernel)
        return case.predicted_ns(profile) / case.measured_ns - 1

    def _profile(self, gpu: str) -> Profile | None:
        shipped = [load_profile(name) for name in profile_names()]
        found = next((profile for profile in shipped if is_of(profile, gpu)), None)
        if found is None:
            return None
        own = replace(found, facts=replace(found.facts, sustained_clock=1.0), _shared={})  # rows are bursts
        if self.folder is None:
            return own
        try:
            return profile_from_folder(self.folder, own, datetime.date.today().isoformat(), taken=four_fifths)
        except ProfileError:
            return None


def summary(errors: Iterable[float]) -> dict[str, float]:
    """How many, the median, the 90th percentile and the worst of errors, and their median with its sign."""
    own = np.array(list(errors))
    sizes = np.abs(own)
    found = {"median": np.median(sizes), "p90": np.quantile(sizes, 0.9), "worst": sizes.max(), "bias": np.median(own)}
    return {"rows": len(own), **{name: round(float(value), 4) for name, value in found.items()}}


def is_shown(case: Case) -> bool:
    """Whether a page draws it beside its prediction: one layer of products in bfloat16, one of attention."""
    if case.dtype != "bfloat16":
        return False
    is_layer = case.family == "products" and case.key[1:] == (8192, 8192) and case.key[0] >= 16
    return is_layer or (case.family == "attention, causal" and case.key[3:6] == (32, 8, 128) and case.key[0] <= 4)


def report(cases: Iterable[Case], predictor: Predictor, shown: list[Any] | None = None) -> list[dict[str, Any]]:
    """A row for each GPU, dtype, family and size class; and, of what several softwares measured, for each of them.

    shown: takes single cases for the page, [GPU, software, shape, measured µs, predicted µs].
    """
    errors: dict[tuple[str, ...], list[float]] = {}
    for case in cases:
        error = predictor.error(case)
        if error is None:
            continue
        if shown is not None and is_shown(case):
            times = (round(ns / 1000, 2) for ns in (case.measured_ns, case.measured_ns * (1 + error)))
            shown.append([case.gpu, case.kernel or case.software, list(case.key), *times])
        trusted = case.kernel or is_trusted({"gpu": case.gpu, "software": case.software, "dtype": case.dtype})
        software = case.kernel or case.software
        base = case.gpu, case.dtype, case.family
        names = [(*base, size, own) for size in {case.size, "all"} - {""} for own in {software, ""}]
        for name in names if trusted else [(*base, "all", f"{software} (distrusted)")]:
            errors.setdefault(name, []).append(error)
    columns = ("gpu", "dtype", "family", "size", "software")
    return [{**dict(zip(columns, name, strict=True)), **summary(own)} for name, own in sorted(errors.items())]


# Command --------------------------------------------------------------------


def main() -> None:
    """Prints the summary, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FOLDER_OR_FILE")
    parser.add_argument("--cross-validate", action="store_true", help="without a fifth of the shapes; takes one folder")
    parser.add_argument("--gpu", action="append", default=[], help="only GPUs whose name begins so")
    parser.add_argument("--output", type=Path, help="NAME: writes NAME.json and NAME.md")
    options = parser.parse_args()
    files = [file for path in options.paths for file in (sorted(path.glob("*.csv*")) if path.is_dir() else [path])]
    folder = options.paths[0] if options.cross_validate else None
    rows = (row for file in files for row in rows_of(file) if "gpu" in row and "time_us" in row)
    wanted = (row for row in rows if not options.gpu or row["gpu"].startswith(tuple(options.gpu)))
    shown: list[Any] = []
    found = report(cases_of(wanted), Predictor(folder), shown)
    text = markdown(found)
    print(text)
    if options.output:
        write_record(options.output, facts("benchmarks.accuracy.gpu_operators"), {"rows": found, "shown": shown}, text)


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of all rows but those of one software alone."""
    shown = [row for row in rows if not row["software"] or "distrusted" in row["software"]]
    lines = [
        f"| {row['gpu']} | {row['dtype']} | {row['family']} | {row['size']}{row['software'] and ', '}{row['software']} "
        f"| {row['rows']:,} | {row['median']:.1%} | {row['p90']:.1%} | {row['worst']:.0%} | {row['bias']:+.1%} |"
        for row in shown
    ]
    head = "| GPU | dtype | family | size | rows | median error | 90th percentile | worst | bias |"
    return "\n".join([head, f"|{' --- |' * 9}", *lines])


if __name__ == "__main__":
    main()
