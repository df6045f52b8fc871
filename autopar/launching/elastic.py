"""torchrun's command line where nodes may be lost for good and come back, as a ladder's `elastic.json` says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import PlanError

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each start of the processes has a store of its own: one for all would be lost with the node that has it, and nodes
that come later would not find it."""
MAX_RESTARTS = 1000
"""Of one node. Each node that is lost or comes back takes one of all others."""


def elastic_torchrun(folder: Path, rendezvous: str, name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments after `torchrun` on each node. rendezvous: host:port. Raises PlanError for a folder that
    `autopar ladder --elastic` has not written."""
    path = folder / "elastic.json"
    try:
        data = json.loads(path.read_text("utf-8"))
        per_node, meeting = int(data["devices_per_node"]), data["rendezvous"]
        nodes = [int(row["ranks"]) // per_node for row in data["rungs"]]
        conf = {
            "keep_alive_interval": int(meeting["keep_alive_s"]),
            "keep_alive_max_attempt": int(meeting["keep_alive_attempts"]),
            "last_call_timeout": int(meeting["last_call_s"]),
        }
        least, most = min(nodes), max(nodes)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise PlanError(
            f"expected {path} as `autopar ladder --elastic` writes it, found none that can be read: {error!r}"
        ) from error
    return [
        f"--nnodes={least}:{most}", f"--nproc-per-node={per_node}", f"--max-restarts={MAX_RESTARTS}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={name}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
        str(folder / "train.py"), "--elastic", str(folder), *arguments,
    ]  # fmt: skip
