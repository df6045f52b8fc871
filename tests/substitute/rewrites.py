"""Random substitutions: rules applied anywhere, gain or not, and the program of what comes out.

python -m tests.substitute.rewrites --models gpt llama --seeds 20 --steps 8
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import autopar
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.ir.sharing import share
from autopar.pipeline import template_of_graph
from autopar.substitute import load_rules, packed
from autopar.substitute.defined import Values
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.rewriting import rewritten
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single


@cache
def matchers() -> tuple[Matcher, ...]:
    """Of every rule that holds in training."""
    return tuple(Matcher(rule) for rule in load_rules() if not rule.inference)


def random_rewrite(values: Values, steps: int, draw: random.Random) -> tuple[Values, list[Match]]:
    """The values after so many random substitutions: a rule first, that rules with few matches come up as well."""
    applied = []
    for _ in range(steps):
        for matcher in draw.sample(matchers(), len(matchers())):
            found = list(matcher.matches(values))
            match = draw.choice(found) if found else None
            after = rewritten(values, match) if match else None
            if match is not None and after is not None:
                values = after
                applied.append(match)
                break
    return values, applied


def graph_after(values: Values) -> Graph:
    """What is planned of values."""
    return share(packed(lowered(values)))


@cache
def alone(model_name: str) -> Any:
    """The model on one device."""
    model, batch = zoo.build(model_name)
    return run_single(model, batch, ("sgd",))


def faults(model_name: str, graph: Graph) -> list[str]:
    """How the program of a graph on one device differs from the model: loss, gradients, norm, weights after steps."""
    model, batch = zoo.build(model_name)
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=1))
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return differences(alone(model_name), run_rank(0, 1, emit(graph, plan), state, batch, ("sgd",)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Programs of randomly rewritten graphs against the models.")
    parser.add_argument("--models", nargs="+", default=list(zoo.NAMES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args(arguments)
    used, wrong = Counter[str](), 0
    for name in chosen.models:
        values = lifted(planned.graph(name))
        for seed in range(chosen.seeds):
            after, applied = random_rewrite(values, chosen.steps, random.Random(seed))
            used.update(match.rule.name for match in applied)
            found = faults(name, graph_after(after))
            wrong += bool(found)
            if found:
                print(f"{name} {seed}: {[(m.rule.name, m.roots) for m in applied]}: {found[:3]}", flush=True)
        print(f"{name}: {len(values.live)} values, {chosen.seeds} rewrites", flush=True)

    print(f"{wrong} wrong; applied: {dict(used.most_common())}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
