"""The command `autopar rebalance`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from autopar.cli.commands import load_model
from autopar.ir.plan import Plan
from autopar.ladders.stores import StateStore
from autopar.ladders.stragglers import read_own_times, rebalanced, report_lines, slowness


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """Its options."""
    parser.add_argument("plan", type=Path, help="that the run began with, whose ranks have equally much to do")
    parser.add_argument("model", help="module:config, where module has build(config) and example_inputs(config)")
    parser.add_argument("log", type=Path, help="of train.py --log-file")
    parser.add_argument("--meta", action="store_true", help="build without weights (for models that do not fit here)")
    parser.add_argument("--steps-left", type=int, required=True, help="of the training")
    parser.add_argument(
        "--restart", type=float, default=StateStore.restart_s, metavar="SECONDS", help="that starting anew takes"
    )
    parser.add_argument("--search", choices=("fast", "default", "thorough"), default="fast")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("rebalanced"), help="a folder for plan.json and slower profiles"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Says whether a slow node is worth another plan, and writes that."""
    plan = Plan.load(options.plan)
    report = slowness(*read_own_times(options.log), plan.mesh.groups[0].devices_per_node)
    model, inputs = load_model(options.model, options.meta)
    store = replace(StateStore(), restart_s=options.restart)
    found = rebalanced(
        plan, model, inputs, report, options.steps_left, options.output, store=store, search=options.search
    )
    print("\n".join(report_lines(found)))
    if found.plan is not None:
        found.plan.save(options.output / "plan.json")
        print(f"  {options.output / 'plan.json'}: autopar emit it, and train on with --checkpoints of the run")
    return 0
