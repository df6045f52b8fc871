"""torchrun's command line."""

from __future__ import annotations

from autopar.launching.job import SavedJob


def torchrun(job: SavedJob, rendezvous: str | None = None, restarts: int = 0) -> list[str]:
    """The arguments after `torchrun` on each node. rendezvous: host:port of one of several nodes."""
    where = ["--standalone"] if rendezvous is None else [
        f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", f"--rdzv-id={job.name}",
    ]  # fmt: skip
    again = [f"--max-restarts={restarts}"] if restarts else []
    return [*where, f"--nproc-per-node={job.per_node}", *again, job.path, *job.arguments]
