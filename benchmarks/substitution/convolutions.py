"""How well a profile knows convolutions that it has not measured: those of four networks, none of which is a vertex.

    python -m benchmarks.substitution.convolutions [--profile cpu]

Every distinct convolution of networks of graphs.py, with one image and with eight, is timed by itself on one thread:
its forward direction and the gradients to its input and to its weight. How fast the machine is now is not the
profile's matter (which was measured with all cores at work): predictions are divided by the median of predicted /
measured over all times. Printed and written to convolutions.json and convolutions.md with command, machine and date:
that median, and the mean |predicted / measured − 1| after it by direction and by kind of convolution.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar import runtime
from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.ir.graph import Node, Ref, Tensor
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.substitution.graphs import build

HERE = Path(__file__).parent
NETWORKS = ("resnext50", "inception_v3", "squeezenet", "vgg19")
BATCHES = (1, 8)
SECONDS, TIMES = 0.03, 3  # of one direction, at least
MOST_PIXELS = 60 * 60  # of images in batches, so that memory never runs out
DIRECTIONS = ("forward", "input", "weight")
Shape = tuple[int, ...]


class Convolution(NamedTuple):
    """Shapes of image and weight; strides and padding by dim; groups."""

    image: Shape
    weight: Shape
    stride: Shape
    padding: Shape
    groups: int

    @property
    def kind(self) -> str:
        kernel = "1 × 1" if self.weight[2:] == (1, 1) else "larger"
        form = "grouped" if self.groups > 1 else "of photographs" if self.image[1] == 3 else "plain"
        return f"{form}, {kernel}{', strided' if self.stride != (1, 1) else ''}, batch {self.image[0]}"


def convolutions() -> list[Convolution]:
    """The distinct ones of the networks."""
    found: dict[Convolution, None] = {}
    for name in NETWORKS:
        with torch.device("meta"):
            graph = trace(*build(name, "train"))
        for node in graph.nodes:
            if node.op.startswith("aten.conv2d"):
                found |= dict.fromkeys(_with_batches(node, *(graph.tensors[item].shape for item in node.operands[:2])))
    return list(found)


def _with_batches(node: Node, image: Shape, weight: Shape) -> Iterator[Convolution]:
    given = dict(enumerate(node.args)) | dict(node.kwargs)
    stride, padding = (given.get(place, given.get(name)) for place, name in ((3, "stride"), (4, "padding")))
    for batch in BATCHES:
        if batch == 1 or image[2] * image[3] <= MOST_PIXELS:
            groups = given.get(6, given.get("groups")) or 1
            yield Convolution((batch, *image[1:]), weight, stride or (1, 1), padding or (0, 0), groups)


def _seconds(call: Callable[[], Any]) -> float:
    """The median of some calls after one, of the thread."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(taken) < TIMES:
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


def measured(made: Convolution) -> tuple[Shape, tuple[float, ...]]:
    """The result's shape, and seconds of the three directions."""
    image, weight = torch.randn(made.image), torch.randn(made.weight)
    rest = (made.stride, made.padding, (1, 1))
    result = torch.conv2d(image, weight, None, *rest, made.groups)
    gradient = torch.randn_like(result)

    def backward(*wanted: bool) -> Callable[[], Any]:
        kind = torch.ops.aten.convolution_backward
        return lambda: kind(gradient, image, weight, None, *rest, False, (0, 0), made.groups, wanted)

    forward = _seconds(lambda: torch.conv2d(image, weight, None, *rest, made.groups))
    taken = forward, _seconds(backward(True, False, False)), _seconds(backward(False, True, False))
    return tuple(result.shape), taken


def predicted(made: Convolution, result: Shape, profile: Profile) -> tuple[float, ...]:
    """Seconds of the three directions, without what a call costs."""
    node = Node("y", "aten.conv2d.default", (Ref("x"), Ref("w")), (), ("y",))

    def times(*wanted: bool) -> tuple[int, int]:
        shapes = (("x", made.image, wanted[0]), ("w", made.weight, wanted[1]), ("y", result, True))
        tensors = {name: Tensor(name, shape, "float32", is_wanted) for name, shape, is_wanted in shapes}
        return node_time_ns(node, (made.image, made.weight), (result,), tensors, profile)

    forward, backward = profile.curve("convolution").call_ns or (0, 0)
    to_input, to_weight = times(True, False), times(False, True)
    return (to_input[0] - forward) / 1e9, (to_input[1] - backward) / 1e9, (to_weight[1] - backward) / 1e9


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Mean errors by kind, and of all."""
    ratios = [[p / m for p, m in zip(row["predicted_s"], row["measured_s"], strict=True)] for row in rows]
    common = statistics.median(ratio for found in ratios for ratio in found)
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for row, found in sorted(zip(rows, ratios, strict=True), key=lambda pair: pair[0]["kind"]):
        errors[row["kind"]].append([abs(ratio / common - 1) for ratio in found])
    errors["all"] = [error for found in errors.values() for error in found]
    lines = [f"Predicted / measured, the median: {common:.2f}. Mean error beside that:", ""]
    lines += ["| convolutions | number | " + " | ".join(DIRECTIONS) + " |", "|---" * 5 + "|"]
    for kind, found in errors.items():
        means = " | ".join(f"{statistics.mean(column):.1%}" for column in zip(*found, strict=True))
        lines.append(f"| {kind} | {len(found)} | {means} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="cpu", help="of this host, by name or file")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    profile = load_profile(options.profile)
    rows = []
    for made in convolutions():
        result, taken = measured(made)
        expected = predicted(made, result, profile)
        rows.append(
            {"kind": made.kind, **made._asdict(), "result": result, "measured_s": taken, "predicted_s": expected}
        )
    text = "\n".join(table(rows))
    write_record(options.output / "convolutions", facts("benchmarks.substitution.convolutions"), {"rows": rows}, text)
    print(text)


if __name__ == "__main__":
    main()
