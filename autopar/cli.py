"""The `autopar` command: plan, show, explain, diff, emit, run and verify."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.pipeline import parallelize, template_plan, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors of ours are printed as one message, exit status 2."""
    sys.path.insert(0, str(Path.cwd()))
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
        return status
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autopar", description="Plans, emits and runs sharded PyTorch programs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    plan = _command(commands, "plan", _plan, "search a plan: autopar plan models.gpt:gpt2 --mesh h100:8x8 -o plan.json")
    _model(plan)
    plan.add_argument("--mesh", required=True, help="profile:nodes x devices a node, such as h100:8x8 or cpu:4")
    plan.add_argument("-o", "--output", type=Path, help="where to write the plan's JSON")
    plan.add_argument("--mode", choices=("train", "inference"), default="train")
    plan.add_argument("--memory-limit", type=int, help="bytes a device")
    plan.add_argument("--template", help="plan by hand instead of searching: dp=2,tp=2,zero=3")
    for name, function, text in (
        ("show", _show, "print a plan on one screen"),
        ("explain", _explain, "why a plan places a module so"),
    ):
        command = _command(commands, name, function, text)
        command.add_argument("plan", type=Path)
        if name == "explain":
            command.add_argument("pattern", help="module path or parameter name; * matches anything")
    diff = _command(commands, "diff", _diff, "what differs between two plans")
    diff.add_argument("plan", type=Path)
    diff.add_argument("other", type=Path)
    for name, function, text in (
        ("emit", _emit, "write program.py, plan.json and train.py"),
        ("run", _run, "emit, then train a few steps with torchrun on this host"),
        ("verify", _verify, "type-check a plan against a model"),
    ):
        command = _command(commands, name, function, text)
        _model(command)
        command.add_argument("plan", type=Path)
        if name != "verify":
            command.add_argument("-o", "--output", type=Path, default=Path("out"))
    return parser


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=function)
    return parser


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="module:config, where module has build(config) and example_inputs(config)")
    parser.add_argument("--meta", action="store_true", help="build without weights (for models that do not fit here)")


def load_model(text: str, meta: bool = False) -> tuple[torch.nn.Module, Any]:
    """Builds "package.module:config". Raises AutoparError when the module lacks what is needed."""
    name, _, attribute = text.partition(":")
    try:
        module = import_module(name)
    except ImportError as error:
        raise AutoparError(f"expected an importable module in {text!r}: {error}") from error
    missing = [item for item in ("build", "example_inputs") if not hasattr(module, item)]
    config = getattr(module, attribute or "Config", None)
    if missing or config is None:
        raise AutoparError(f"expected {name} to have {', '.join([*missing, attribute or 'Config'])}; found it has not")
    config = config() if callable(config) else config
    with torch.device("meta" if meta else "cpu"):
        return module.build(config), module.example_inputs(config)


def _plan(options: argparse.Namespace) -> int:
    model, inputs = load_model(options.model, options.meta)
    mesh = Mesh.parse(options.mesh)
    if options.template:
        choices = {key: int(value) for key, _, value in (item.partition("=") for item in options.template.split(","))}
        keywords: dict[str, Any] = {**choices, "sequence_parallel": bool(choices.get("sequence_parallel", 0))}
        plan = template_plan(model, mesh, inputs, mode=options.mode, memory_limit=options.memory_limit, **keywords)
    else:
        progress = (lambda line: print(line, file=sys.stderr)) if sys.stderr.isatty() else None
        plan = parallelize(
            model, mesh, inputs, mode=options.mode, memory_limit=options.memory_limit, progress=progress
        ).plan
    if options.output:
        plan.save(options.output)
    print(plan)
    return 0


def _show(options: argparse.Namespace) -> int:
    print(Plan.load(options.plan))
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(Plan.load(options.plan).explain(options.pattern))
    return 0


def _diff(options: argparse.Namespace) -> int:
    print(Plan.load(options.plan).diff(Plan.load(options.other)))
    return 0


def _emit(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    model, inputs = load_model(options.model, options.meta)
    folder = parallelize(model, plan.mesh, inputs, mode=plan.mode, plan=plan).save(options.output)
    print(f"torchrun --nproc-per-node {plan.mesh.devices_per_node} {folder / 'train.py'}")
    return 0


def _run(options: argparse.Namespace) -> int:
    _emit(options)
    world = Plan.load(options.plan).mesh.num_devices
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.run([*command, str(options.output / "train.py")], check=False).returncode


def _verify(options: argparse.Namespace) -> int:
    model, inputs = load_model(options.model, options.meta)
    verify(Plan.load(options.plan), model, inputs)
    print("the plan is well typed for this model")
    return 0
