"""Which line of the user's something comes of: a call that is running, a node of an exported graph, an error."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import fx

_OWN_ROOT, _TORCH_ROOT = str(Path(__file__).parent), f"{Path(torch.__file__).parent}/"

Place = tuple[str, int]
"""File and number of a line."""


@cache
def is_own(filename: str) -> bool:
    """Whether a file is the user's: neither torch's, nor one of these, nor text that torch wrote and ran."""
    return not filename.startswith((_TORCH_ROOT, _OWN_ROOT, "<"))


def place_of(frame: FrameType | None) -> Place | None:
    """That of the innermost call that is the user's, of those that led to a frame."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def innermost(places: Iterable[Place]) -> Place | None:
    """The last that is the user's."""
    return next((place for place in reversed(list(places)) if is_own(place[0])), None)


def places_in(text: str) -> list[Place]:
    """Those that a stack trace names."""
    return [(file, int(number)) for file, number in re.findall(r'File "([^"]+)", line (\d+)', text)]


def line_at(place: Place | None) -> str:
    """File, number and text, as messages have it."""
    return f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}" if place else "unknown source line"


def user_line(frame: FrameType | None) -> str:
    """The line of the innermost call that is the user's, of those that led to a frame."""
    return line_at(place_of(frame))


def source_at(place: Place | None) -> str:
    """As nodes of a graph have it: the file in its folder, and the number; empty where that is not known."""
    return f"{'/'.join(Path(place[0]).parts[-2:])}:{place[1]}" if place else ""


def node_place(node: fx.Node) -> Place | None:
    """Of the line that made a node: of the user's, or else of torch's."""
    places = places_in(str(node.meta.get("stack_trace") or ""))
    return innermost(places) or next((at for at in reversed(places) if not at[0].startswith(("<", _OWN_ROOT))), None)


def node_line(node: fx.Node) -> str:
    """The line that made a node."""
    return line_at(node_place(node))
