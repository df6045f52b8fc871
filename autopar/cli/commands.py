"""The commands that plan, read plans, run them and measure: options, and what each does."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import rich
import torch

from autopar.arguments import ALLOWED
from autopar.cost.memory import OPTIMIZERS
from autopar.cost.profile import profile_to_json
from autopar.cost.residuals import size_name
from autopar.emit import script_name
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.ir.constraint import Constraint
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.routing import Routing
from autopar.observed.kineto import read_traces
from autopar.observed.learning import MOST_LESSONS, learned
from autopar.pipeline import parallelize, played, template_plan, verify, with_timeline
from autopar.profiler import MEASURE_GPU, load_profile, measure_profile
from autopar.profiler.linked import read_links, with_measured_links
from autopar.profiler.measure_links import parse_mesh
from autopar.profiler.measure_links import run as run_links
from autopar.profiler.published.make import MOVED, profile_from_folder
from autopar.profiler.text import shipped_text
from autopar.show.explain import check_matches
from autopar.show.text import prediction_text, time_text
from autopar.trace.weightless import built_on_meta

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TEMPLATE: dict[str, Callable[[str], Any]] = {
    "dp": int, "tp": int, "pp": int, "microbatches": int, "schedule": str, "chunks": int,
    "layers": lambda text: tuple(map(int, text.split("+"))), "sequence_parallel": int, "zero": int, "hsdp": int,
    "cp": int, "context": str, "ep": int, "exchange": str, "exchange_chunks": int,
    "experts": str, "replicas": int, "recompute": str, "offload": str, "gradients": str, "async_tp": int,
}  # fmt: skip
_PLACES = ("stored", "used", "output", "tensor", "operands", "input")
_PINS = {"axis": str, "zero": int, "min_dims": int, "microbatches": int, "stages": int, "recompute": str,
         "schedule": str, "chunks": int}  # fmt: skip


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of one command, and the function that runs it."""
    options, function = _COMMANDS[name]
    options(parser)
    parser.set_defaults(command=function)


def _profiling(profile: argparse.ArgumentParser) -> None:
    profile.add_argument("-o", "--output", type=Path, help="a JSON file; default: where the profile `cpu` is kept")
    profile.add_argument("--points", type=Path, help="keep measured points here, and go on from those that are there")
    profile.add_argument("--windows", type=int, default=3, help="how often all of this host is measured; medians count")
    profile.add_argument("--pause", type=float, default=0.0, help="seconds between windows: longer ones outlast drift")
    profile.add_argument(
        "--routing", metavar="MODEL", help="module:config: how often its routers choose each expert, for plan --routing"
    )
    profile.add_argument(
        "--batches", type=int, default=1, help="of --routing: batches(config), or example_inputs, so many"
    )
    profile.add_argument("--collectives", action="store_true", help="under torchrun: collectives along axes of meshes")
    profile.add_argument("--axes", type=parse_mesh, action="append", default=[], help="of --collectives, such as 2x4")
    profile.add_argument("--seconds", type=float, default=120.0, help="about how long --collectives may take")
    profile.add_argument("--links", type=Path, help="put the points of this file, from --collectives, into --into")
    profile.add_argument(
        "--from", dest="folder", type=Path, help="make the profile --into anew from tables of measurements in a folder"
    )
    profile.add_argument("--gpu", type=Path, metavar="FOLDER", help="measure this host's GPU, into tables for --from")
    profile.add_argument(
        "--only",
        choices=(MOVED,),
        default="",
        help="of --from: what moves bytes, updates, PyTorch's attention",
    )
    profile.add_argument("--like", default="", metavar="GPU", help="the GPU of those tables that --into resembles")
    profile.add_argument("--into", metavar="PROFILE", help="the profile that is copied with what was found, into -o")
    profile.add_argument(
        "--from-trace", type=Path, metavar="TRACES",
        help="what autopar run --trace has seen, put into a copy of the profile that was planned with (or --into)",
    )  # fmt: skip


def _planning(plan: argparse.ArgumentParser) -> None:
    _model(plan)
    plan.add_argument("--mesh", required=True, help="profile:nodes x devices a node, such as h100:8x8 or cpu:4")
    plan.add_argument("-o", "--output", type=Path, help="where to write the plan's JSON")
    plan.add_argument("--mode", choices=("train", "inference"), default="train")
    plan.add_argument("--memory-limit", type=_size, help="bytes a device, such as 16GB")
    plan.add_argument(
        "--optimizer", choices=(*OPTIMIZERS, "none"), default="adamw", help="whose state a device must hold"
    )
    plan.add_argument("--search", choices=("fast", "default", "thorough"), default="default")
    plan.add_argument("--precision", choices=("bf16",), help="bf16 compute with float32 master weights")
    plan.add_argument(
        "--runs", choices=("eager", "compiled", "either"), default="eager",
        help="of a search: whether train.py calls rank.compile(); either: where the step is surely shorter by that",
    )  # fmt: skip
    plan.add_argument(
        "--routing", type=routing_of, metavar="TEXT",
        help="how tokens choose experts: balanced, power_law:1.2, or a file that autopar profile --routing wrote",
    )  # fmt: skip
    plan.add_argument(
        "--algorithm", metavar="TEXT",
        help="copies of the parameters that meet otherwise than by the sum of gradients, so that training is not what "
        "one device computes: local_sgd(8), local_sgd(8, after=100), adasum, backup(1); of a search also with "
        "copies=4; of a template of stages pipedream",
    )  # fmt: skip
    plan.add_argument(
        "--allow", choices=ALLOWED, action="append", default=[],
        help="of a search: an option that is taken by name only; offload: what a device does not hold is on the host; "
        "compression: gradients are summed in 8 bits where that is faster",
    )  # fmt: skip
    plan.add_argument("--template", help="plan by hand instead of searching: dp=2,tp=2,zero=3")
    plan.add_argument(
        "--split", choices=("equal", "speed"),
        help="of a template: blocks to stages (or rows to unequal devices) in equal parts, or by the devices' speed",
    )  # fmt: skip
    plan.add_argument(
        "--constraint", type=parse_constraint, action="append", default=[], metavar="TEXT",
        help="what the search has to keep to, as often as needed: 'layers.0.mlp.up.weight used=R', "
        "'layers.* recompute=full' or 'stages=2'",
    )  # fmt: skip


def _reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", type=Path)


def _explaining(command: argparse.ArgumentParser) -> None:
    _reading(command)
    command.add_argument("pattern", help="module path or parameter name; * matches anything")


def _differing(command: argparse.ArgumentParser) -> None:
    _reading(command)
    command.add_argument("other", type=Path)


def _reporting(report: argparse.ArgumentParser) -> None:
    _reading(report)
    _model(report, optional="; with it the page has the timeline, memory over time and traffic by axis")
    report.add_argument("-o", "--output", type=Path, default=Path("plan.html"))
    report.add_argument("--compare", type=Path, metavar="OTHER", help="another plan of the model, beside the first")
    report.add_argument(
        "--trace", type=Path, metavar="TRACES", help="also what autopar run --trace has seen, beside it"
    )


def _comparing(compare: argparse.ArgumentParser) -> None:
    _reading(compare)
    compare.add_argument("traces", type=Path, help="the folder of traces, or one rank's file")
    _model(compare, optional="; with it the step is predicted anew, by the profile as it is now")
    compare.add_argument("-o", "--output", type=Path, help="also a page")


def _of_model(command: argparse.ArgumentParser) -> None:
    _model(command)
    command.add_argument("plan", type=Path)


def _simulating(command: argparse.ArgumentParser) -> None:
    _of_model(command)
    command.add_argument("--trace", type=Path, help="also write the timeline, to open in Perfetto")


def _emitting(command: argparse.ArgumentParser) -> None:
    _of_model(command)
    command.add_argument("-o", "--output", type=Path, default=Path("out"))
    _other_batches(command)


def _running(command: argparse.ArgumentParser) -> None:
    _emitting(command)
    command.add_argument("--trace", type=Path, metavar="TRACES", help="trace the steps, for autopar compare")
    command.add_argument("--steps", type=int, default=8, help="of --trace")


def _model(parser: argparse.ArgumentParser, optional: str = "") -> None:
    text = "module:config, where module has build(config) and example_inputs(config)"
    parser.add_argument("model", nargs="?" if optional else None, help=text + optional)
    parser.add_argument("--meta", action="store_true", help="build without weights (for models that do not fit here)")


def _size(text: str) -> int:
    """Reads a number of bytes: 16000000000, 16GB or 0.5TB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and len(text) < 40 else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a number of bytes above 0, such as 16GB, found {text!r}")
    return size


def _other_batches(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shape", type=_lengths, action="append", default=[], metavar="TEXT",
        help="a further shape of inputs under the plan, as often as needed: input_ids=3x512,labels=3x512",
    )  # fmt: skip
    command.add_argument(
        "--pad",
        type=_filling,
        metavar="TEXT",
        help="fill short batches up with rows that count for nothing: labels=-100",
    )


def _lengths(text: str) -> dict[str, tuple[int, ...]]:
    """Reads input_ids=3x512,labels=3x512."""
    found = _pairs(text, r"[1-9][0-9]*(x[1-9][0-9]*)*", "lengths such as input_ids=3x512,labels=3x512")
    return {name: tuple(map(int, lengths.split("x"))) for name, lengths in found.items()}


def _filling(text: str) -> dict[str, float]:
    """Reads labels=-100,weights=0."""
    found = _pairs(text, r"-?[0-9]+(\.[0-9]+)?", "values such as labels=-100")
    return {name: float(number) if "." in number else int(number) for name, number in found.items()}


def _pairs(text: str, pattern: str, expected: str) -> dict[str, str]:
    pairs = [item.strip().split("=", 1) for item in text.split(",")]
    if not all(len(pair) == 2 and pair[0] and re.fullmatch(pattern, pair[1]) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return dict(pairs)


def routing_of(text: str) -> Routing:
    """Reads balanced, power_law:1.2 or the name of a file of counts."""
    try:
        is_file = text.endswith(".json") or Path(text).is_file()
        return Routing.read(text) if is_file else Routing.parse(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_constraint(text: str) -> Constraint:
    """Reads a pattern, then what is pinned of all that it matches, separated by blanks.

    `layers.0.mlp.up.weight used=S(0),R axis=d1` allows two types on one mesh axis; `soft` prefers instead of requiring.
    The other words are `Constraint`'s fields. Without a pattern it is about the whole plan: `stages=2`.
    """
    words = text.split()
    pattern = words.pop(0) if words and not _is_pin(words[0]) else "*"
    fields: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        kind = _PINS.get(key)
        if word == "soft":
            fields["soft"] = True
        elif key in _PLACES and value and "what" not in fields:
            fields |= {"what": key, "allow": tuple(value.split(","))}
        elif kind is not None and value and (kind is str or value.isdigit()):
            fields[key] = kind(value)
        else:
            raise argparse.ArgumentTypeError(
                f"expected a pattern and what is pinned, such as 'layers.0.mlp.up.weight used=S(0),R axis=d0', with "
                f"one of {', '.join(_PLACES)} and any of {', '.join(_PINS)} and soft, found {word!r} in {text!r}"
            )
    if not fields.keys() - {"soft", "axis", "min_dims"}:
        raise argparse.ArgumentTypeError(f"expected what is pinned after the pattern, such as used=R, found {text!r}")
    try:
        return Constraint(pattern, **fields)
    except AutoparError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _is_pin(word: str) -> bool:
    return word.partition("=")[0] in (*_PLACES, *_PINS, "soft")


def load_model(text: str, meta: bool = False) -> tuple[torch.nn.Module, Any]:
    """Builds "package.module:config". Raises AutoparError when the module lacks what is needed."""
    name, _, attribute = text.partition(":")
    attribute = attribute or "Config"
    if name.endswith(".py") or "/" in name:
        module_name = name.removesuffix(".py").strip("./").replace("/", ".")
        raise AutoparError(
            f"expected a model as module and config, such as models.gpt:gpt2, found a file's name, {text!r}\n"
            f"write {module_name}:{attribute}, in the folder from which Python finds that"
        )
    try:
        module = import_module(name)
    except Exception as error:  # whatever the module does while it is imported
        raise AutoparError(
            f"expected a model as module and config, such as models.gpt:gpt2, found {text!r}: {_told(error)}\n"
            "run from the folder that holds the module, or install it"
        ) from error
    missing = [item for item in ("build", "example_inputs", attribute) if not hasattr(module, item)]
    if missing:
        raise AutoparError(
            f"expected {name} to have build(config), example_inputs(config) and {attribute}, found no "
            f"{' and no '.join(missing)}\nconfigs that it has: {', '.join(_configs(module)) or 'none'}"
        )
    config = getattr(module, attribute)
    config = _made(f"{name}.{attribute}()", config) if callable(config) else config
    build = partial(module.build, config)
    model = _made(f"{name}.build(config)", partial(built_on_meta, build) if meta else build)
    if not isinstance(model, torch.nn.Module):
        raise AutoparError(
            f"expected {name}.build(config) to return a torch.nn.Module, found {type(model).__name__}\n"
            "end it with `return model`"
        )
    with torch.device("meta" if meta else "cpu"):
        inputs = _made(f"{name}.example_inputs(config)", module.example_inputs, config)
    if inputs is None:
        raise AutoparError(
            f"expected {name}.example_inputs(config) to return one global batch, found None\n"
            "return a dict of tensors by the names of forward's arguments, or a tuple of them in their order"
        )
    return model, inputs


def _made(what: str, function: Any, *arguments: Any) -> Any:
    """What a function of the user's module returns. Raises AutoparError where it raises anything."""
    try:
        return function(*arguments)
    except AutoparError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise AutoparError(
            f"expected {what} to return, found {_told(error)}\nit was raised at {place.filename}:{place.lineno}"
        ) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _configs(module: Any) -> list[str]:
    """Of what the module itself defines, the functions without parameters and the classes that are no modules."""
    members = inspect.getmembers(module, lambda member: getattr(member, "__module__", None) == module.__name__)
    return [name for name, member in members if _may_be_config(member)]


def _may_be_config(member: Any) -> bool:
    if inspect.isclass(member):
        return not issubclass(member, torch.nn.Module)
    return inspect.isfunction(member) and not inspect.signature(member).parameters


def _plan(options: argparse.Namespace) -> int:
    mesh, template = Mesh.parse(options.mesh), _template(options.template)
    model, inputs = load_model(options.model, options.meta)
    names = ("mode", "precision", "memory_limit", "optimizer", "routing", "algorithm")
    asked = {name: getattr(options, name) for name in names}
    if template is not None and options.constraint:
        raise PlanError(
            "expected --template or --constraint, found both: constraints bound a search, and a template is none"
        )
    if template is None and options.split:
        raise PlanError("expected --split beside --template, found none: a search splits by speed where devices differ")
    if template is not None and options.runs != "eager":
        raise PlanError(f"expected --template or --runs {options.runs}, found both: a template's program runs eagerly")
    if template is not None and options.allow:
        raise PlanError("expected --template or --allow, found both: of a template say offload=optimizer and the like")
    if template is not None:
        template |= {"split": options.split} if options.split else {}
        plan = template_plan(model, mesh, inputs, **asked, **template)
    else:
        searched = {
            "constraints": options.constraint,
            "search": options.search,
            "allow": options.allow,
            "runs": options.runs,
        }
        plan = parallelize(model, mesh, inputs, **asked, **searched).plan
    if options.output:
        plan.save(options.output)
    print(plan)
    return 0


def _template(text: str | None) -> dict[str, Any] | None:
    """Reads "dp=2,tp=2,zero=3". Raises PlanError naming the item that is none."""
    if text is None:
        return None
    found: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        kind = _TEMPLATE.get(key)
        if kind is None or not value or (kind is not str and not value.replace("+", "0").isdigit()):
            raise PlanError(
                f"expected --template as items such as dp=2, with {', '.join(_TEMPLATE)}; found {item.strip()!r}"
            )
        found[key] = kind(value)
    return found | ({"sequence_parallel": bool(found["sequence_parallel"])} if "sequence_parallel" in found else {})


def _show(options: argparse.Namespace) -> int:
    """Tables on a terminal; elsewhere the plain text, which other programs may read."""
    plan = Plan.load(options.plan)
    if sys.stdout.isatty():
        rich.print(plan)
    else:
        print(plan)
    return 0


def _report(options: argparse.Namespace) -> int:
    plans = [Plan.load(path) for path in (options.plan, options.compare) if path is not None]
    if options.model:
        model, inputs = load_model(options.model, options.meta)
        plans = [with_timeline(plan, model, inputs) for plan in plans]
    plans[0].report(options.output, *plans[1:], trace=options.trace)
    print(f"written to {options.output}; open it in a browser")
    return 0


def _compare(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    if options.model:
        plan = with_timeline(plan, *load_model(options.model, options.meta))
    print(plan.compare(options.traces))
    if options.output:
        plan.report(options.output, trace=options.traces)
        print(f"written to {options.output}; open it in a browser")
    return 0


def _explain(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    check_matches(plan, options.pattern)
    print(plan.explain(options.pattern))
    return 0


def _diff(options: argparse.Namespace) -> int:
    print(Plan.load(options.plan).diff(Plan.load(options.other)))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    model, inputs = load_model(options.model, options.meta)
    plan, timeline = played(plan, model, inputs)
    print(f"{plan.model} on {plan.mesh}\n{prediction_text(plan.predicted, plan.memory_limit)}")
    exposed = ", ".join(f"{kind} {time_text(spent)}" for kind, spent in timeline.exposed.items())
    print(f"  exposed     {exposed or 'no communication'}")
    if options.trace:
        timeline.save(options.trace)
        print(f"  timeline    {options.trace} (open it in https://ui.perfetto.dev)")
    return 0


def _emit(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    model, inputs = load_model(options.model, options.meta)
    program = parallelize(model, plan.mesh, inputs, mode=plan.mode, plan=plan, shapes=options.shape, pad=options.pad)
    is_traced = getattr(options, "trace", None) is not None
    folder = program.save_traced(options.output) if is_traced else program.save(options.output)
    print(f"torchrun {_ranks_text(plan)} {folder / script_name(plan)}")
    return 0


def _ranks_text(plan: Plan) -> str:
    """torchrun's options for as many ranks; of a plan with servers all on one host, since theirs have others."""
    if plan.uses_servers:
        return f"--nproc-per-node {plan.num_processes}"
    nodes = f"--nnodes {plan.mesh.nodes} " if plan.mesh.nodes > 1 else ""
    return f"{nodes}--nproc-per-node {plan.mesh.devices_per_node}"


def _run(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    mesh = plan.mesh
    if mesh.nodes > 1:
        raise MeshError(
            f"expected a plan for one node, found one for {mesh}; take `autopar emit` and start torchrun on each node"
        )
    if plan.uses_servers and options.trace:
        raise MeshError(
            f"expected ranks that all train where a step is traced, found servers in {mesh}; leave out --trace"
        )
    _emit(options)
    count = str(plan.num_processes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    found_here = str(Path(__file__).parents[2])  # the ranks import this autopar, also from a checkout
    paths = [found_here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = [str(options.output / script_name(plan))]
    if options.trace:
        started = ["-m", "autopar.runtime.recording", str(options.output), "--into", str(options.trace)]
        started += ["--steps", str(max(1, options.steps))]
    status = subprocess.run([*command, *started], env=environment, check=False).returncode
    if options.trace and not status:
        print(f"autopar compare {options.plan} {options.trace}")
    return status


def _verify(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    model, inputs = load_model(options.model, options.meta)
    verify(plan, model, inputs)
    print("the plan is well typed for this model")
    return 0


def _profile(options: argparse.Namespace) -> int:
    if options.routing:
        return _profile_routing(options)
    if options.from_trace:
        return _profile_from_trace(options)
    if options.folder:
        return _profile_from(options)
    if options.collectives or options.links:
        return _profile_links(options)
    if options.gpu:
        return _profile_gpu(options)
    profile, path = measure_profile(options.output, options.points, max(1, options.windows), options.pause)
    facts = profile.facts
    print(f"{profile.title}\n  {facts.provenance}")
    print(f"  float32     {facts.peak_flops['float32'] / 1e9:.3g} GFLOP/s a rank")
    print(f"  memory      {facts.memory_bandwidth / 1e9:.3g} GB/s, {facts.capacity_bytes / 1e9:.3g} GB")
    for link in profile.links.values():
        print(f"  {link.level.ljust(11)} {link.bandwidth / 1e9:.3g} GB/s, {link.alpha_ns / 1e3:.3g} µs a message")
    name = path if options.output else "cpu"
    print(f"written to {path}; plan with it: --mesh {name}:4")
    return 0


def _profile_from_trace(options: argparse.Namespace) -> int:
    """The profile with what a run has shown; plans that are made with it are predicted so."""
    if options.output is None:
        raise PlanError("expected -o FILE for the profile with what was seen, found none; take -o seen.json")
    traces = read_traces(options.from_trace)
    names = set(traces[0].expected["profiles"])
    if not options.into and len(names) > 1:
        raise PlanError(
            f"expected a run on devices of one kind, or --into one of {', '.join(sorted(names))}, found none"
        )
    found = learned(load_profile(options.into or names.pop()), traces, date.today().isoformat())
    options.output.write_text(json.dumps(profile_to_json(found.profile), indent=1) + "\n")
    for lesson in found.lessons[:MOST_LESSONS]:
        print(f"  {lesson}")
    seen = found.profile.seen
    print(
        f"written to {options.output}, with {len(seen.calls)} calls, {len(seen.collectives)} collectives and "
        f"{len(seen.updates)} updates as they were seen; plan with it: --mesh {options.output}:N"
    )
    return 0


def _profile_routing(options: argparse.Namespace) -> int:
    """Of a model with the weights that its `build` gives it, on what its `batches` or `example_inputs` give."""
    if options.output is None:
        raise PlanError("expected -o FILE for the counts, found none; take -o routing.json")
    model, inputs = load_model(options.routing)
    found = Routing.measured(model, _batches(options.routing, inputs, max(1, options.batches)))
    for path, counts in found.counts:
        mean = sum(counts) / len(counts)
        print(
            f"  {path.ljust(40)} {len(counts)} experts, {sum(counts):,} choices: the hottest has "
            f"{max(counts) / mean:.2f} times the mean, the coldest {min(counts) / mean:.2f}"
        )
    found.save(options.output)
    print(f"written to {options.output}; plan with it: --routing {options.output}")
    return 0


def _batches(text: str, first: Any, count: int) -> Iterator[Any]:
    """So many batches of a model's module: those of its `batches(config)`, or else of `example_inputs(config)`."""
    name, _, attribute = text.partition(":")
    module = import_module(name)
    config = getattr(module, attribute or "Config")
    config = config() if callable(config) else config
    if hasattr(module, "batches"):
        yield from itertools.islice(module.batches(config), count)
        return
    yield first
    for _ in range(count - 1):
        yield module.example_inputs(config)


def _profile_gpu(options: argparse.Namespace) -> int:
    """In a process of its own, some three minutes long."""
    command = [sys.executable, "-P", str(MEASURE_GPU), str(options.gpu)]
    if subprocess.run(command, check=False).returncode:
        raise PlanError("expected a GPU that torch can measure, found the error above; see `autopar profile --help`")
    print(f"tables in {options.gpu}; go on with: autopar profile --from {options.gpu} --into h100 -o profile.json")
    return 0


def _profile_from(options: argparse.Namespace) -> int:
    """Of published tables, for a profile that has the facts of its device."""
    if options.output is None or not options.into:
        raise PlanError(
            "expected --into PROFILE, whose blocks are made anew, and -o FILE for it, found "
            f"profile {options.into} and output {options.output}"
        )
    base = load_profile(options.into)
    profile = profile_from_folder(options.folder, base, date.today().isoformat(), options.like, options.only)
    options.output.write_text(shipped_text(profile))
    for name, table in profile.tables.items():
        print(f"  {name.ljust(42)} {f'{table.times:g} × {table.like}' if table.like else 'made of points'}")
    for item in profile.residuals:
        low, middle, high = (f"{math.expm1(log):+.1%}" for log in item.quantiles)
        size = size_name(item.from_ns)
        print(f"  {f'{item.family} {item.kind} {size}'.ljust(42)} {middle} ({low} to {high}), {item.count} left out")
    print(f"written to {options.output}; measured against predicted: the median (90% of rows) of what was left out")
    return 0


def _profile_links(options: argparse.Namespace) -> int:
    """Of the ranks that torchrun started, or of a file that they wrote elsewhere."""
    if options.output is None or (options.links and not options.into):
        raise PlanError(
            "expected -o FILE for what is written, and with --links the --into PROFILE that takes the points, found "
            f"output {options.output} and profile {options.into}"
        )
    if options.into:
        load_profile(options.into)  # refused before anything is measured
    found = read_links(options.links) if options.links else run_links(options.axes, options.seconds, options.points)
    if found is None:  # not the first rank
        return 0
    data = found
    if options.into:
        data = profile_to_json(with_measured_links(load_profile(options.into), found, date.today().isoformat()))
    options.output.write_text(json.dumps(data, indent=1) + "\n")
    for item in found["collectives"]:
        (size, least), (most, longest) = item["points"][0], item["points"][-1]
        print(
            f"  {item['collective'].ljust(14)} {item['nodes']} × {item['inside']} ranks: {least / 1e3:.3g} µs for "
            f"{size} bytes, {most / longest:.3g} GB/s at {most} bytes"
        )
    print(f"written to {options.output}")
    return 0


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "plan": (_planning, _plan),
    "show": (_reading, _show),
    "explain": (_explaining, _explain),
    "diff": (_differing, _diff),
    "report": (_reporting, _report),
    "compare": (_comparing, _compare),
    "simulate": (_simulating, _simulate),
    "emit": (_emitting, _emit),
    "run": (_running, _run),
    "verify": (_of_model, _verify),
    "profile": (_profiling, _profile),
}
