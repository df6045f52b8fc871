"""Random batch sizes and lengths under one plan: each equal to one device, or refused before anything runs.

    python -m tests.runtime.drawn_shapes [--shapes 20] [--plans dp tp_sequence …] [--seed 0]

Two models (causal attention; statistics of the batch and masked means) in each plan, on two gloo ranks; loss, gradients
and buffers of each shape, forth and back on the same parameters. A difference ends the command with its shape.
"""

from __future__ import annotations

import argparse

from autopar.errors import PlanError
from tests.rank_pool import pool
from tests.runtime.test_shapes import PLANS, causal, check, pooled

MODELS = {"causal": causal, "pooled": pooled}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for model in options.models:
        for plan in options.plans:
            try:
                equal, refused = check(pool(2), MODELS[model], plan, options.shapes, options.seed)
            except PlanError as error:  # such as statistics of a batch over microbatches
                print(f"{model} {plan}: no such plan, refused before anything runs: {error}", flush=True)
                continue
            told = options.shapes - equal - refused
            print(
                f"{model} {plan}: {equal} shapes equal, {refused} refused, {told} drawn twice of {options.shapes}",
                flush=True,
            )


if __name__ == "__main__":
    main()
