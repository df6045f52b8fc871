"""Where a predicted gain comes from: each operator of a graph before and after, predicted beside measured.

    python -m benchmarks.substitution.operators [--models resnext50 …] [--rounds 7] [--profile cpu]

Graphs of graphs.py in inference are rewritten as in `run`. Both are then computed operator by operator on one thread,
in turns, and each operator's time is the median of the rounds: of the processor, with what Python takes to call it.
What is made of parameters alone is made before. Printed and written to operators.json and operators.md with command,
machine and date: milliseconds by kind of operator.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar import runtime
from autopar.cost import Profile, node_time_ns
from autopar.ir.graph import Graph, Node, map_references
from autopar.ir.structure import constant_tensors
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.facts import facts, write_record
from benchmarks.substitution.graphs import build
from benchmarks.substitution.run import SEARCH_S
from benchmarks.substitution.searching import search

HERE = Path(__file__).parent
MODELS = ("resnext50", "inception_v3", "squeezenet", "vgg19")


class Computed:
    """A graph with random parameters, computed operator by operator."""

    def __init__(self, graph: Graph, batch: dict[str, Tensor]) -> None:
        self.graph, self.values = graph, dict(batch)
        for item in graph.stored:
            tensor = graph.tensors[item.tensor]
            made = torch.rand(tensor.shape) * 0.02 if tensor.dtype.startswith("float") else torch.zeros(tensor.shape)
            self.values[item.tensor] = made.to(getattr(torch, tensor.dtype))
        constant = constant_tensors(graph)
        self.nodes = [node for node in graph.nodes if not node.results or not constant.issuperset(node.results)]
        self.taken_ns: dict[str, list[int]] = defaultdict(list)
        made_before = [node for node in graph.nodes if node.results and constant.issuperset(node.results)]
        for node in made_before:
            self._run(node)

    def round(self) -> None:
        """Computes the graph once."""
        for node in self.nodes:
            self.taken_ns[node.name].append(self._run(node))

    def _run(self, node: Node) -> int:
        _, name, overload = node.op.split(".")
        call = getattr(getattr(torch.ops.aten, name), overload)
        args, options = map_references((node.args, node.kwargs), self.values.__getitem__)
        begin = time.thread_time_ns()
        result = call(*args, **dict(options))
        taken = time.thread_time_ns() - begin
        results = result if isinstance(result, tuple | list) else (result,)
        self.values |= {made: value for made, value in zip(node.outputs, results, strict=False) if made}
        return taken

    def times(self, profile: Profile) -> Iterator[tuple[str, float, float]]:
        """Of each operator its kind, and milliseconds predicted and measured."""
        tensors = self.graph.tensors
        for node in self.nodes:
            shapes = [tuple([tensors[name].shape for name in names]) for names in (node.operands, node.results)]
            forward_ns, _ = node_time_ns(node, *shapes, tensors, profile)
            measured = statistics.median(self.taken_ns[node.name])
            yield node.op.split(".")[1], forward_ns / 1e6, measured / 1e6


def rows(name: str, rounds: int, profile: Profile) -> list[dict[str, Any]]:
    """Of a model: for each kind of operator how many there are, and what they take, before and after."""
    model, batch = build(name, "inference")
    graph = trace(model, batch, mode="inference")
    found = search(graph, profile, "inference", SEARCH_S)
    with torch.no_grad():
        both = {"before": Computed(graph, batch), "after": Computed(found.graph, batch)}
        for _ in range(rounds):
            for each in both.values():
                each.round()
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for side, each in both.items():
        for kind, predicted, measured in each.times(profile):
            for key in (kind, "all"):
                sums[key, side] = [a + b for a, b in zip(sums[key, side], (1, predicted, measured), strict=True)]
    return [
        {"model": name, "operator": kind, **{side: [round(x, 3) for x in sums[kind, side]] for side in both}}
        for kind in sorted({kind for kind, _ in sums}, key=lambda kind: -sums[kind, "before"][2])
    ]


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| graph | operator | before: number, predicted, measured ms | after | gain predicted, measured ms |"]
    lines.append("|---" * 5 + "|")
    for row in found:
        before, after = row["before"], row["after"]
        cells = (f"{int(count)}: {predicted:.2f}, {measured:.2f}" for count, predicted, measured in (before, after))
        gains = ", ".join(f"{b - a:.2f}" for b, a in zip(before[1:], after[1:], strict=True))
        lines.append(f"| {row['model']} | {row['operator']} | {' | '.join(cells)} | {gains} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", default="cpu", help="of this host, by name or file")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runtime.keep_freed_memory()
    profile = load_profile(options.profile)
    found = [row for name in options.models for row in rows(name, options.rounds, profile)]
    told = facts("benchmarks.substitution.operators")
    write_record(options.output / "operators", told, {"rows": found}, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
