"""A packing as text, for a screen: a host a paragraph, with what it runs in its period; the cost, and the proof."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.colocation.packing import HostedRun, HostPacking, PackedHost
from autopar.ir.naming import printable
from autopar.show.text import bytes_text, time_text


def packing_text(packing: HostPacking) -> str:
    """All of it."""
    return printable("\n".join(_lines(packing)))


def _lines(packing: HostPacking) -> Iterator[str]:
    if packing.lacks:
        yield "none: nothing runs all sessions in time"
        yield from (f"  {said}" for said in packing.lacks)
        return
    counts = ", ".join(f"{count} of {kind}" for kind, count in packing.counts().items())
    yield f"{counts}: {packing.cost:g} {packing.unit}, {_proof(packing)}; merged greedily {packing.greedy_cost:g}"
    whom = (
        "all requests, as they come evenly," if packing.percentile is None else f"{packing.percentile:.3g} of requests"
    )
    yield f"  {whom} are answered within their bounds"
    for host in packing.hosts:
        yield from _host_lines(host)


def _proof(packing: HostPacking) -> str:
    return "none is better (CP-SAT)" if packing.is_proved else f"at least {packing.bound:g} by CP-SAT's bound"


def _host_lines(host: PackedHost) -> Iterator[str]:
    yield (
        f"  {host.count} × {host.kind}: every {time_text(host.period_ns)}, busy {host.busy_share:.0%} when full, "
        f"{bytes_text(host.peak_bytes)} a device"
    )
    yield from (f"    {_run_text(run)}" for run in host.runs)


def _run_text(run: HostedRun) -> str:
    said = f"{run.session}: {run.rate_s:.4g} a second in batches of up to {run.batch} ({time_text(run.latency_ns)})"
    if run.window is None:
        return f"{said}, from {time_text(run.begins_ns)} on, answered within {time_text(run.worst_ns)}"
    own = run.window
    return (
        f"{said}, alone: begins with {own.batch} or after {time_text(own.wait_ns)}, {own.mean_batch:.3g} a batch in "
        f"the mean, busy {own.busy_share:.0%}, answered within {time_text(own.worst_ns)}"
    )
