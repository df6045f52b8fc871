"""The command `autopar audit`, which imports a model's module only where one is named."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from autopar.auditing import command


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """Its options."""
    command.add_options(parser)
    parser.set_defaults(command=lambda options: command.run(options, _load))


def _load(text: str, meta: bool) -> Any:
    return import_module("autopar.cli.commands").load_model(text, meta)
