"""The `autopar` command: plan, show, explain, diff, report, emit, run, launch, compare, verify, profile and others.

Only what the command at hand needs is imported, so that help comes at once and `audit` judges before torch is there.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.errors import AutoparError, InternalError
from autopar.ir.naming import printable

if TYPE_CHECKING:
    from autopar.cli.commands import load_model as load_model
    from autopar.cli.commands import parse_constraint as parse_constraint
    from autopar.cli.commands import routing_of as routing_of

COMMANDS = {
    "plan": ("commands", "search a plan: autopar plan models.gpt:gpt2 --mesh h100:8x8 -o plan.json"),
    "show": ("commands", "print a plan on one screen"),
    "explain": ("commands", "why a plan places a module so, and what the alternatives cost"),
    "diff": ("commands", "what differs between two plans"),
    "report": ("commands", "write a page that shows a plan, or two side by side"),
    "compare": ("commands", "what was predicted of a step beside what autopar run --trace saw"),
    "simulate": ("commands", "predict a plan's step time, memory and traffic"),
    "emit": ("commands", "write program.py, plan.json and train.py, or for inference evaluate.py"),
    "run": ("commands", "emit, then run a few steps with torchrun on this host"),
    "verify": ("commands", "type-check a plan against a model"),
    "profile": ("commands", "measure this host, or under torchrun the links between its ranks"),
    "launch": ("launch", "start a saved program, or write the files of a cluster"),
    "ladder": ("ladder", "plans for many meshes and batches: scaling curve, what to rent, forms for schedulers"),
    "pack": ("pack", "which served models share which devices, so that all answer in time"),
    "audit": ("audit", "judge another framework's configuration, and better it"),
}
"""Each command's file in this room, which has `add(parser, name)`, and what it does."""


def __getattr__(name: str) -> Any:
    if name not in ("load_model", "parse_constraint", "routing_of"):
        raise AttributeError(f"module 'autopar.cli' has no attribute {name!r}")
    return getattr(import_module("autopar.cli.commands"), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 2 after one message for what the user can mend, 130 when it was
    interrupted."""
    sys.path.insert(0, str(Path.cwd()))
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(given).parse_args(given)
    plain, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"autopar: {message}\n"
    try:
        status: int = options.command(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except (AutoparError, OSError) as error:
        if isinstance(error, InternalError):
            traceback.print_exc()
        print(printable(f"autopar: {error}"), file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = plain


class _ArgumentParser(argparse.ArgumentParser):
    """Says what was wrong and where help is, without all options before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}\nsee {self.prog} --help\n")


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands, with the options of the one that is given."""
    parser = _ArgumentParser(prog="autopar", description="Plans, emits and runs sharded PyTorch programs.")
    parser.add_argument(
        "--version", action="version", version=f"autopar {version('autopar')}, torch {version('torch')}"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    wanted = next((word for word in given if not word.startswith("-")), None)
    for name, (file, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            import_module(f"autopar.cli.{file}").add(command, name)
    return parser
