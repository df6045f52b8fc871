"""How planning grows with the graph: a GPT of up to 1,000 layers, and a loop of up to 10,000 operators without modules.

    python -m benchmarks.plan_time.large [--search fast] [--output benchmarks/plan_time/large.json]

On 8 h100, with real weights. Each row runs in a process of its own: processor seconds of `parallelize` (with the check
against eager, which takes up to 8 of them, but where --no-check is given), and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import facts, write_record

ROWS = [*(f"layers {count}" for count in (250, 500, 1000)), *(f"operators {count}" for count in (2500, 5000, 10000))]


def plan_row(row: str, search: str, check: bool) -> dict[str, Any]:
    """Plans one row's model in this process."""
    import torch
    from torch import nn

    import autopar
    from models import gpt

    kind, count = row.split()

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(int(count) // 3):
                x = (x * 0.999 + 0.001).tanh()
            return self.last(x).square().mean()

    model, inputs = Loop(), {"x": torch.randn(64, 64)}
    if kind == "layers":
        config = gpt.Config(vocab_size=128, seq_len=32, num_layers=int(count), batch_size=32)
        model, inputs = gpt.build(config), gpt.example_inputs(config)
    started = time.process_time()
    program = autopar.parallelize(model, autopar.Mesh("h100", devices_per_node=8), inputs, search=search, check=check)
    return {
        "seconds": time.process_time() - started,
        "operators": sum(len(stage.nodes) for stage in program.plan.stages),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "step_time_ns": program.plan.predicted.step_time_ns,
        "source_lines": program.source.count("\n"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="default", choices=("fast", "default"))
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--row", choices=ROWS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(plan_row(given.row, given.search, not given.no_check)))
        return
    rows = {}
    for row in ROWS:
        command = [sys.executable, "-m", "benchmarks.plan_time.large", "--row", row, "--search", given.search]
        command += ["--no-check"] if given.no_check else []
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[row] = json.loads(said.splitlines()[-1])
        print(row, rows[row], flush=True)
    if given.output:
        write_record(given.output, facts("benchmarks.plan_time.large"), {"rows": rows})


if __name__ == "__main__":
    main()
