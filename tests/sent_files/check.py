"""What comes of a changed file: refused clearly, or as good as the one it was; anything else is a problem.

Refused: an AutoparError that says what was expected and found. As good: it prints, explains, compares and reports;
where it verifies, its program is emitted, and computes what the model computes.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rich
import torch
from torch import Tensor

import autopar
from autopar import runtime as rt
from autopar.cost.profile import Profile, read_profile
from autopar.emit import emit
from autopar.errors import AutoparError, InternalError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.microbatch import check_plan
from autopar.pipeline import simulated_step, template_of_graph
from autopar.program import load_source
from autopar.rewrites import graph_of
from tests.random_programs.check import _local, _parts, run_in_threads
from tests.random_programs.world import device_mesh
from tests.sent_files.bases import Base
from tests.sent_files.mutations import CANARY

SECONDS = 60  # what takes longer hangs

REFUSED, KEPT, RIGHT = "refused", "as good", "right in another way"


class _Hangs(BaseException):
    """Raised by the alarm; no code under test catches it."""


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise _Hangs(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(check: Callable[[Path], str], content: str | bytes) -> str:
    """REFUSED, KEPT or RIGHT; else what is wrong, on several lines."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path = Path(folder) / "sent.json"
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        try:
            with _in_time():
                found = check(path)
        except InternalError:
            found = traceback.format_exc()
        except AutoparError as error:
            found = REFUSED if "expected" in str(error) and "found" in str(error) else f"unclear: {error}"
        except (Exception, _Hangs):
            found = traceback.format_exc()
        finally:
            os.chdir(here)
        return "code of the file was run" if Path(folder, CANARY).exists() else found


def plan_faults(base: Base, path: Path) -> str:
    """Reads a plan, shows it in every way, then emits and simulates it where it verifies."""
    plan = Plan.load(path)
    assert Plan.from_json(plan.to_json()) == plan
    _show(base, plan, path.with_suffix(".html"))
    graph = graph_of(plan, base.graph)
    check_plan(graph, plan)
    source = emit(graph, plan)
    load_source(source)
    simulated_step(graph, plan)
    if source == base.source:
        return KEPT
    wrong = _differences(base, graph, plan, source)
    return f"another program: {wrong}" if wrong else RIGHT


def _show(base: Base, plan: Plan, page: Path) -> None:
    texts = [str(plan), plan.explain("*"), plan.explain("layers"), plan.diff(base.plan), base.plan.diff(plan)]
    assert all(text.replace("\n", "").isprintable() for text in texts), "commands for a terminal in a text"
    rich.print(plan, file=io.StringIO())
    plan._repr_html_()
    with contextlib.suppress(AutoparError):  # says that the graph is missing
        plan.timeline()
    plan.report(page)


def _differences(base: Base, graph: Graph, plan: Plan, source: str) -> str:
    """What differs from one device where the program runs; what the runtime refuses is none."""
    axes = () if len(plan.stages) > 1 else tuple((axis.name, axis.size) for axis in plan.stage.axes)
    expected, gradients = base.expected
    job = (source, axes, base.state, base.batch, base.mode)
    for rank, (loss, found) in enumerate(run_in_threads(plan.mesh.num_devices, _run, job)):
        if not torch.allclose(loss, expected, rtol=1e-4, atol=1e-6):
            return f"rank {rank} has {loss} for {expected}"
        parts = _parts(graph, plan, rank)
        for name, own in found.items():
            if name in gradients and not torch.allclose(own, parts.own(name, gradients[name]), rtol=1e-3, atol=1e-5):
                return f"rank {rank} has another gradient of {name}"
    return ""


def _run(
    rank: int, source: str, axes: Any, state: dict[str, Tensor], batch: dict[str, Tensor], mode: str
) -> tuple[Tensor, Mapping[str, Tensor]]:
    built = rt.build(load_source(source).Program, device_mesh(axes) if axes else None, "cpu")
    built.init_from(state, broadcast=False)
    if mode == "inference":
        return built(**batch).detach(), {}
    loss = built.train_step(**batch)
    gradients = {name: parameter.grad for name, parameter in built.named_parameters() if parameter.grad is not None}
    return loss.detach(), {name: _local(gradient).clone() for name, gradient in gradients.items()}


def check_profile(base: Base, path: Path) -> str:
    """Reads a profile, and plans with it: every predicted time is one."""
    profile = read_profile(path)
    _plausible(profile)
    mesh = autopar.Mesh(str(path), nodes=2, devices_per_node=2)
    for choices in ({"dp": 4, "zero": 3}, {"dp": 2, "pp": 2, "microbatches": 2}):
        predicted = template_of_graph(base.graph, mesh, **choices).predicted  # type: ignore[arg-type]
        assert 0 < predicted.step_time_ns < 10**14, f"a step of {predicted.step_time_ns} ns"
    return KEPT


def _plausible(profile: Profile) -> None:
    assert profile.usable_bytes > 0
    assert all(source for source in profile.provenance.values())
