"""Changes to data that somebody could make by hand, by mistake or by intent: of type, range, content and shape.

Fields are drawn by what they are called, not by how often they occur: a plan has thousands of placements and one mode.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

CANARY = "canary_was_written"
_WRITE = f"open({CANARY!r}, 'w').close()"
PAYLOADS = (
    f'x"""\n{_WRITE}\n"""',
    f"x\n{_WRITE}\n#",
    f"x\r{_WRITE}\r#",
    f"x\u2028{_WRITE}",
    f"x\x0c\n{_WRITE}",
    f"x\x85{_WRITE}",
    f"'+{_WRITE}+'",
    f"{{{_WRITE}}}",
    f"__import__('os').system('touch {CANARY}')",
    f"x'''\n{_WRITE}\n'''",
    "\\",
    'x"',
    "'",
    f"x=({_WRITE})",
    f"x):\n    {_WRITE}\n    def f(self",
    "\\N{BULLET}",
    "\\x",
    "\ud800",
    "\udc80tail",
    "\x1b[2J",
    "\0",
    "x\n",
    "class",
    "None",
    "self",
    "torch",
    "__import__",
    "ﬁ",
    "²",
    "",
    " ",
    "a b",
    "a.b",
    "a|b|c|d",
    "|",
    "||",
    "*",
    "[",
    "x" * 5000,
    "%s%n",
    "{0}",
    "../../etc/passwd",
    "S(0)",
    "S(99)",
    "R R R R",
    "P",
    "I",
    "null",
    "[red]x[/red]",
    "</script><script>",
)
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    2.0,
    1.5,
    -0.0,
    float("nan"),
    float("inf"),
    1e-300,
    1e300,
    2**31,
    2**62,
    2**63,
    2**64,
    10**18,
    10**400,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    [1, 2, 3],
    "",
    "1",
    [["x"]],
)

Path = tuple[Any, ...]


def paths(data: Any, path: Path = ()) -> Iterator[tuple[Path, Path]]:
    """Every place below the top, with what the field is called: numbers and names of a model's own are all alike."""
    items = enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ()
    for key, inner in items:
        yield (*path, key), _called((*path, key))
        yield from paths(inner, (*path, key))


_BY_NAME = frozenset(
    {
        "inputs",
        "storage",
        "nodes",
        "coverage",
        "sources",
        "parameters",
        "types",
        "scopes",
        "comm_bytes",
        "memory",
        "rules",
        "rates",
        "starts",
        "binding",
        "peak_flops",
    }
)


def _called(path: Path) -> Path:
    around: tuple[Any, ...] = ("", *path)
    pairs = zip(around, path, strict=False)
    return tuple("*" if (isinstance(key, int) and key > 5) or before in _BY_NAME else key for before, key in pairs)


def mutated(text: str, rng: random.Random) -> str | bytes:
    """The text of a file with one to three changes."""
    if rng.random() < 0.03:
        return _torn(text, rng)
    data = json.loads(text)
    found = text
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        _change(data, rng)
        try:
            found = json.dumps(data)
        except RecursionError:  # nested twice: deeper than Python itself writes
            break
    return found if rng.random() > 0.02 else _with_a_field_twice(found, rng)


def _torn(text: str, rng: random.Random) -> str | bytes:
    """What a full disk, another encoding, or a slip of the keyboard leaves."""
    cut = rng.randrange(len(text))
    kinds: tuple[Callable[[], str | bytes], ...] = (
        lambda: text[:cut],
        lambda: text[:cut] + rng.choice('{}[]",:0e\\\x00') + text[cut + 1 :],
        lambda: "\ufeff" + text,
        lambda: text.encode("utf-16"),
        lambda: text.encode()[:cut] + b"\xff\xfe" + text.encode()[cut:],
        lambda: "",
        lambda: "[" * rng.choice((500, 10_000, 100_000)),
        lambda: text[:cut] + "[" * 300 + "]" * 300 + text[cut:],
        lambda: text + text,
        lambda: json.dumps(json.dumps(text)),
        lambda: "null",
        lambda: f"{text}\x00",
    )
    return rng.choice(kinds)()


def _with_a_field_twice(text: str, rng: random.Random) -> str:
    at = rng.choice([position for position, character in enumerate(text) if character == "{"])
    end = text.find(":", at)
    return text if end < 0 else f"{text[: at + 1]}{text[at + 1 : end]}: 0, {text[at + 1 :]}"


def _change(data: Any, rng: random.Random) -> None:
    by_name: dict[Path, list[Path]] = {}
    for path, name in paths(data):
        by_name.setdefault(name, []).append(path)
    if not by_name:
        return
    path = rng.choice(by_name[rng.choice(sorted(by_name, key=repr))])
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    rng.choice((_replace, _replace, _replace, _nudge, _nudge, _nudge, _drop, _rename, _repeat, _swap))(holder, key, rng)


def _replace(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = rng.choice(PAYLOADS if rng.random() < 0.5 else VALUES)
    if holder[key] == [["x"]]:  # nested as deep as a reader may meet it
        for _ in range(rng.choice((20, 60, 900))):
            holder[key] = [holder[key]]


def _nudge(holder: Any, key: Any, rng: random.Random) -> None:
    """A value like the one that is there."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = rng.choice(
            (value + 1, value - 1, 2 * value, value // 2, -value, float(value), str(value), value * 10**9)
        )
    elif isinstance(value, float):
        holder[key] = rng.choice((value * 1e-9, value * 1e-12, value * 2, -value, value * 1e12, str(value)))
    elif isinstance(value, str):
        payload = rng.choice(PAYLOADS)
        holder[key] = rng.choice(
            (
                value + payload,
                payload + value,
                value[:-1],
                value.upper(),
                f"{value}\n",
                value.replace(".", "/"),
                value.replace("S(0)", "R"),
                value.replace("R", "I"),
                value.replace("S(0)", "S(1)"),
            )
        )
    elif isinstance(value, list):
        rng.shuffle(value)
    elif isinstance(value, dict):
        value[rng.choice(PAYLOADS)] = copy.deepcopy(rng.choice([*value.values(), None]))


def _drop(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _rename(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(PAYLOADS)] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(rng.choice(holder))


def _repeat(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = [copy.deepcopy(holder[key])] * 2


def _swap(holder: Any, key: Any, rng: random.Random) -> None:
    """With a neighbour, or a value of another field beside it."""
    keys = list(range(len(holder))) if isinstance(holder, list) else list(holder)
    other = rng.choice(keys)
    holder[key], holder[other] = holder[other], holder[key]
