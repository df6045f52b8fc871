"""`autopar pack`: which models share which devices, so that all answer in time, and how long each waits for a batch.

models under load, kinds of hosts      `sessions`
random arrivals, periods               `arrivals`, `periods`
sessions on hosts                      greedily (`squishy`: Nexus), exactly (`exact`), and what each runs (`packing`)
a server's wait for the next request   `windows`
files                                  `form`, `text`

Plans and programs are made elsewhere; the server that queues requests and runs them stays outside.
"""

from __future__ import annotations

from autopar.colocation.form import packing_schema, read_sessions, sessions_schema
from autopar.colocation.packing import HostedRun, HostPacking, PackedHost, pack
from autopar.colocation.sessions import BatchCurve, BatchPoint, HostKind, ServingSession, host_of, request_curve
from autopar.colocation.windows import BatchingWindow, window, windows

__all__ = [
    "BatchCurve", "BatchPoint", "BatchingWindow", "HostKind", "HostPacking", "HostedRun", "PackedHost",
    "ServingSession", "host_of", "pack", "packing_schema", "read_sessions", "request_curve", "sessions_schema",
    "window", "windows",
]  # fmt: skip
