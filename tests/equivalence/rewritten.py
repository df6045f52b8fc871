"""Every model in rewritten graphs, sharded: the one that the search finds for a GPU, and the one of split products.

    python -m tests.equivalence.rewritten [--models gpt llama] [--plans dp tp]

Substitutions that gain on a GPU are applied and the programs run on gloo ranks, against the model on one device.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import autopar
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError
from autopar.pipeline import template_of_graph
from autopar.profiler import load_profile
from autopar.substitute import load_rules, substituted
from autopar.trace import find_blocks
from tests.equivalence import planned, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool

PLANS = ("dp", "zero3", "tp", "dp_tp", "zero3_microbatches")


def rows(name: str, plans: Sequence[str]) -> list[tuple[str, str]]:
    """For each rewritten graph and plan: what it is, and how it went."""
    model, batch = zoo.build(name)
    graph = planned.graph(name)
    blocks = find_blocks(graph)
    found = substituted(
        graph, blocks.paths, blocks.node_representative, load_rules(), load_profile("h100"), seconds=8.0
    )
    single = run_single(model, batch, ("sgd",))
    state = {**model.state_dict(), **dict(model.named_buffers())}
    made = []
    for number, candidate in enumerate(candidate for candidate in found.candidates if candidate.steps):
        rules = dict(Counter(step.rule for step in candidate.steps))
        for plan_name in plans:
            choices = planned.PLANS[plan_name]
            world = choices.get("dp", 1) * choices.get("tp", 1)
            what = f"{name} graph {number} {rules} {plan_name}"
            try:
                plan = template_of_graph(candidate.graph, autopar.Mesh("cpu", devices_per_node=world), **choices)
            except InternalError:
                raise
            except AutoparError as error:
                made.append((what, f"no such plan: {str(error)[:100]}"))
                continue
            results = pool(world).run(run_rank, emit(candidate.graph, plan), state, batch, ("sgd",))
            faults = differences(single, results[0])
            made.append((what, f"WRONG {faults[:2]}" if faults else "equal"))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*zoo.NAMES])
    parser.add_argument("--plans", nargs="+", default=[*PLANS], choices=[*planned.PLANS])
    chosen = parser.parse_args(arguments)
    tally: Counter[str] = Counter()
    for name in chosen.models:
        for what, how in rows(name, chosen.plans):
            tally[how.split()[0]] += 1
            print(f"{what}: {how}", flush=True)
    print(dict(tally))
    return int(tally["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
