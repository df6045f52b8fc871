"""A batch script for Slurm: one torchrun a node, which meet at the first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from autopar.errors import PlanError
from autopar.launching.job import SavedJob

_SCRIPT = """#!/bin/bash
{options}
# Submit it with sbatch. All nodes must see {folder}.
# Before its time ends, and when it is cancelled, the job gets SIGTERM, at which train.py saves a checkpoint; a job that
# is queued again goes on from it.
set -eu
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-}}"  # srun does not take it over by itself
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))
exec srun --kill-on-bad-exit=1 torchrun \\
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={per_node} --max-restarts={restarts} \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="${{hosts[0]}}:$port" \\
  {command}
"""

_VALUE = re.compile(r"[A-Za-z0-9_.,:@%+=/&|*!()\[\]{}~^-]+")
"""What sbatch reads as it is: blanks, quotes, backslashes and # have a meaning there. Lists of nodes and constraints
have brackets, & and |."""


def batch_script(job: SavedJob, options: Mapping[str, str] | None = None, restarts: int = 3) -> str:
    """The text of the script. options: further ones of sbatch by name without dashes, such as partition, account, time.

    Raises PlanError for an option that sbatch could not read from a comment, or that says what the plan says.
    """
    own = {
        "job-name": job.name, "nodes": str(job.nodes), "ntasks-per-node": "1",
        **({"gpus-per-node": str(job.per_node)} if job.on_gpus else {"cpus-per-task": str(job.per_node)}),
    }  # fmt: skip
    usual = {"output": "%x-%j.log", "signal": "TERM@120", "requeue": ""}
    given = dict(options or {})
    for name, value in given.items():
        if name in own and name != "cpus-per-task":
            raise PlanError(f"expected options besides what the plan says, found {name}={value}; plan for another mesh")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or (value and not _VALUE.fullmatch(value)):
            raise PlanError(f"expected an option of sbatch as name=value without blanks, found {name}={value!r}")
    lines = [
        f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in (own | usual | given).items()
    ]
    return _SCRIPT.format(
        options="\n".join(lines), folder=shlex.quote(str(job.folder)), per_node=job.per_node,
        restarts=restarts, command=shlex.join([job.path, *job.arguments]),
    )  # fmt: skip
