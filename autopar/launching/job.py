"""What every launcher must know of a saved program: how many nodes and ranks, and which script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.emit import script_name
from autopar.errors import MeshError, PlanError
from autopar.ir.plan import Plan

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""Of a job: what Slurm, Kubernetes and Ray all take."""


@dataclass(frozen=True, slots=True)
class SavedJob:
    """A script on nodes of equally many ranks. arguments: of the script."""

    name: str
    folder: Path
    script: str
    nodes: int
    per_node: int
    on_gpus: bool
    arguments: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The script's, as it is seen on each node."""
        return str(self.folder / self.script)


def read_job(folder: Path, name: str | None = None, arguments: Sequence[str] = ()) -> SavedJob:
    """The job of a folder that `program.save` wrote. Raises PlanError where there is no plan or no script, MeshError
    for nodes of unequally many devices, which no launcher starts as one job."""
    plan_file = folder / "plan.json"
    if not plan_file.is_file():
        raise PlanError(f"expected a folder that `autopar emit` or program.save wrote, found no plan.json in {folder}")
    plan = Plan.load(plan_file)
    script = script_name(plan)
    if not (folder / script).is_file() or not (folder / "program.py").is_file():
        raise PlanError(f"expected {script} and program.py beside the plan in {folder}, found not both; emit again")
    counts = {group.devices_per_node for group in plan.mesh.groups}
    if len(counts) > 1:
        raise MeshError(f"expected nodes of equally many devices, found {plan.mesh}; start torchrun on each by hand")
    if plan.uses_servers:
        raise MeshError(
            f"expected nodes of equally many ranks, found servers beside the devices of {plan.mesh}; start torchrun on "
            f"each by hand, with the servers' hosts last, for {plan.num_processes} ranks in all"
        )
    name = name or _name_of(folder)
    if not _NAME.fullmatch(name):
        raise PlanError(
            f"expected a name of at most 63 small letters, digits and dashes, with a letter first, found {name!r}"
        )
    if not str(folder.resolve()).isprintable():
        raise PlanError(f"expected a folder whose path can be printed, found {str(folder.resolve())!r}")
    on_gpus = any(Path(group.profile).stem != "cpu" for group in plan.mesh.groups)
    return SavedJob(name, folder.resolve(), script, plan.mesh.nodes, counts.pop(), on_gpus, tuple(arguments))


def _name_of(folder: Path) -> str:
    letters = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return (letters if letters[:1].isalpha() else f"autopar-{letters}".strip("-"))[:63].rstrip("-")
