"""The closed loop on this host: a plan is traced, its profile learns from that, and the step is predicted again.

    python -m benchmarks.loop.run [MODEL ...]

For each model (module:config): the step as the host's profile predicts it, measured in a first run; the step as the
profile predicts it that has learned from this run, held against a second run, which it has not seen. A line each.
A model that the profile had wrong by more than 10% is one whose first error says so: none is made wrong. On one rank a
step is what it spends of a processor, so that others on the host do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import autopar
from autopar.cli import load_model
from autopar.cost.profile import profile_to_json
from autopar.observed.kineto import read_traces
from autopar.observed.learning import learned
from autopar.profiler import load_profile
from autopar.program import PlannedProgram

MODELS = (
    "models.gpt:Config",
    "models.llama:Config",
    "models.wide_resnet:Config",
    "models.unet:Config",
    "models.lstm:Config",
)


def planned(model: str, profile: str) -> PlannedProgram:
    """The model on one rank."""
    module, inputs = load_model(model)
    mesh = autopar.Mesh(profile, devices_per_node=1)
    plan = autopar.template_plan(module, mesh, inputs, check=False)
    return autopar.parallelize(module, mesh, inputs, plan=plan, check=False)


def traced(folder: Path, into: Path, steps: int) -> Path:
    """A traced run of the folder's program."""
    command = [sys.executable, "-m", "autopar.runtime.recording", str(folder), "--into", str(into)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--steps", str(steps)], env=environment, check=True, capture_output=True)
    return into


def row(model: str, steps: int, folder: Path) -> str:
    """What the loop does for a model."""
    program = planned(model, "cpu")
    program.save_traced(folder / "out")
    first = program.plan.compare(traced(folder / "out", folder / "first", steps))
    found = learned(load_profile("cpu"), read_traces(folder / "first"), date.today().isoformat())
    path = folder / "seen.json"
    path.write_text(json.dumps(profile_to_json(found.profile)))
    again = planned(model, str(path))
    second = again.plan.compare(traced(folder / "out", folder / "second", steps))
    times = (first.predicted_ns, first.measured_ns, second.predicted_ns, second.measured_ns)
    told = " | ".join(f"{ns / 1e6:.2f}" for ns in times)
    return f"| {model} | {told} | {first.error:+.1%} | {second.error:+.1%} | {found.lessons[0].op} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print("| model | predicted ms | first run | predicted again | second run | error | error again | most wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            print(row(model, options.steps, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
