"""The command `autopar launch`."""

from __future__ import annotations

import argparse

from autopar.launching import command


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """Its options."""
    command.add_options(parser)
    parser.set_defaults(command=command.run)
