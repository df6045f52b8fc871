"""The command `autopar pack`."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.colocation import pack, read_sessions
from autopar.colocation.packing import WORK_S
from autopar.ir.writing import write_whole


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """Its options."""
    parser.add_argument(
        "sessions", type=Path, help="a file of sessions and hosts (autopar/colocation/sessions.schema.json)"
    )
    parser.add_argument("--work", type=float, default=WORK_S, help="what the exact search may do, in CP-SAT's seconds")
    parser.add_argument("-o", "--output", type=Path, help="a file for the packing as JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Packs and prints; 1 where nothing does it."""
    asked = read_sessions(options.sessions)
    found = pack(asked.sessions, asked.hosts, percentile=asked.percentile, work_s=options.work)
    if options.output is not None:
        write_whole(options.output, found.to_json())
    print(found)
    return 1 if found.lacks else 0
