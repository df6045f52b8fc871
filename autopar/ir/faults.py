"""The last resort: what trips autopar itself ends in an InternalError that says what was done, and where.

    what was raised → whose code raised it, by its frames → ours: InternalError, from what was raised
                                                            the user's (forward, a callback, a rule): as it was raised

An error of our own classes is meant for whoever gets it, and goes on as it is. So do interrupts, memory that runs out,
warnings that are errors, files that cannot be read, and modules that are not installed.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from autopar.errors import InternalError
from autopar.ir.graph import Graph, Node

_MEANT = (MemoryError, OSError, ImportError, Warning)
_OUT_OF_MEMORY = "OutOfMemoryError"
_PYTHON = sys.stdlib_module_names
_TOOLS = {*_PYTHON, "torch", "numpy", "networkx", "ortools", "jsonschema", "referencing", "rich"}
"""What raises for whoever calls it: an error from there is a fault of its caller."""
_DOING = {
    "trace": "tracing the model", "substitute": "looking for equal graphs",
    "passes.rewrite": "looking for equal graphs", "rewrites": "looking for equal graphs",
    "passes.template": "looking at templates", "families": "looking at templates",
    "passes.place": "choosing placements", "places": "choosing placements",
    "passes.stage": "choosing stages", "passes.kinds": "choosing stages", "passes.balance": "sharing rows",
    "passes.branch": "placing branches", "passes.refine": "refining",
    "ops": "applying the operators' rules", "intraop": "choosing placements", "interop": "cutting stages",
    "staging": "cutting stages", "staged": "choosing stages", "unequal": "choosing stages", "shares": "sharing rows",
    "zero": "choosing what is stored whole and computed again", "branches": "placing branches", "soap": "refining",
    "simulate": "simulating the step", "cost": "pricing", "emit": "writing the program", "show": "showing the plan",
    "ir": "checking the plan", "program": "building the program", "runtime": "building the program",
}  # fmt: skip
"""By room, or pass. The outermost one says what was asked for; "planning" where none is named."""


@contextmanager
def faults_told() -> Iterator[None]:
    """Raises InternalError for what code of autopar raises inside and is no answer to the user."""
    try:
        yield
    except Exception as error:
        frames = _frames(error.__traceback__)
        if _is_meant(error) or not _is_ours(frames):
            raise
        raise InternalError(_told(error, frames)) from error


def is_fault(error: BaseException) -> bool:
    """Whether autopar's own code raised it, no library that it calls, and not as an answer to the user."""
    return not _is_meant(error) and _is_ours(_frames(error.__traceback__), _PYTHON)


def _is_meant(error: BaseException) -> bool:
    kind = type(error)
    return isinstance(error, _MEANT) or kind.__name__ == _OUT_OF_MEMORY or kind.__module__.startswith("autopar.")


_Frame = tuple[FrameType, int]


def _frames(trace: TracebackType | None) -> list[_Frame]:
    """Outermost first, each with its line. What Python raised further in is at the end."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _room(frame: FrameType) -> str:
    """The top-level package; "autopar" of emitted programs, too."""
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return "autopar" if name.startswith("autopar_program") else name


def _is_ours(frames: list[_Frame], tools: Container[str] = _TOOLS) -> bool:
    """Whether the innermost code that is none of these tools' is autopar's."""
    rooms = (_room(frame) for frame, line in reversed(frames) if not _passes_on(frame, line))
    return next((room for room in rooms if room not in tools), "") == "autopar"


def _passes_on(frame: FrameType, line: int) -> bool:
    """Whether a mode of torch, which sees all calls, merely makes the call that the model does."""
    text = linecache.getline(frame.f_code.co_filename, line)
    return frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__") and "func(*args" in text


def _told(error: Exception, frames: list[_Frame]) -> str:
    own = [(frame, line) for frame, line in frames if _room(frame) == "autopar"]
    rooms = [str(frame.f_globals["__name__"]).split(".") for frame, _ in own]
    names = (".".join(room[1 : 3 if "passes" in room else 2]) for room in rooms if "faults" not in room)
    doing = next((_DOING[name] for name in names if name in _DOING), "planning")
    frame, line = own[-1]
    reason = " ".join(str(error).split())[:300]
    return (
        f"expected {doing} to end, found {type(error).__name__}{f': {reason}' if reason else ''}, raised at "
        f"{_place(frame.f_code.co_filename, line)}{_where(error, frames)}\n"
        "This is a fault of autopar, not of the model or the plan: please report it with its traceback. Until it is "
        'mended, another template or Constraint, or search="fast", may lead around it.'
    )


def _place(path: str, line: int) -> str:
    """Of autopar's own files, from its folder on."""
    root = str(Path(__file__).parents[2])
    return f"{path.removeprefix(root).lstrip('/')}:{line}"


def _where(error: Exception, frames: list[_Frame]) -> str:
    """The node that was at hand, by what the innermost frames hold, with its source line; else that of the model."""
    for frame, line in reversed(frames):
        values, room = frame.f_locals, _room(frame)
        if room != "autopar" and room not in _TOOLS and frame is not frames[0][0]:
            return f"\n  at {_place(frame.f_code.co_filename, line)}"
        if room != "autopar":
            continue
        if isinstance(values.get("node"), Node):
            return _named(values["node"])
        nodes = _nodes_of_key(error, values) or [value for value in values.values() if isinstance(value, Node)]
        if nodes:
            return _named(nodes[-1])
        for value in values.values():
            if type(value).__module__ == "torch.fx.node" and hasattr(value, "meta"):
                return f"\n  at node {value.name} ({value.target}){_source(value.meta.get('stack_trace'))}"
    return ""


def _named(node: Node) -> str:
    return f"\n  at node {node.name} ({node.op})" + (f" at {node.source}" if node.source else "")


def _nodes_of_key(error: Exception, values: Mapping[str, Any]) -> list[Node]:
    """The node that makes what was looked up in vain, or reads it."""
    if not isinstance(error, KeyError) or not error.args:
        return []
    nodes = [node for value in values.values() if isinstance(value, Graph) for node in value.nodes]
    readers = [node for node in nodes if error.args[0] in node.operands]
    return [node for node in nodes if error.args[0] in (node.name, *node.results)] or readers[:1]


def _source(stack: Any) -> str:
    """The innermost line of a traced node's stack."""
    lines = [text.strip() for text in str(stack or "").splitlines() if text.strip().startswith("File ")]
    if not lines:
        return ""
    path, number = lines[-1].removeprefix("File ").split(",")[:2]
    where = f"{path.strip(chr(34))}:{number.strip().removeprefix('line ')}"
    return f" at {where}: {linecache.getline(path.strip(chr(34)), int(number.split()[-1])).strip()}"
