"""Takes values out of a file by their keys: checks what kind they are, notes where they stand, and afterwards accounts
for every key that nobody took."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from autopar.auditing.job import JobFile, LegalityFault, NotCarried, TrainingJob
from autopar.auditing.shell import UNKNOWN
from autopar.auditing.values import FileValue
from autopar.errors import PlanError

OFF: tuple[Any, ...] = (None, False, "none", "None", "", 0, "no", "disabled", "false", [], {}, "NO")
"""Values by which a feature is left out."""


class KnownKey(NamedTuple):
    """Keys of which a plan has nothing, and why. kind: as in `NotCarried`; off: values that leave the feature out."""

    pattern: str
    kind: str
    why: str
    off: Sequence[Any] = OFF


def beside(*patterns: str, why: str = "nothing that a step's time or memory depends on") -> list[KnownKey]:
    """Keys that do not matter to a plan: logging, paths, learning rates."""
    return [KnownKey(pattern, "does not matter", why) for pattern in patterns]


def missing(why: str, *patterns: str, off: Sequence[Any] = OFF) -> list[KnownKey]:
    """Keys of features that have no equivalent here."""
    return [KnownKey(pattern, "no equivalent", why, off) for pattern in patterns]


class Taker:
    """The values of one file, as a reader takes them."""

    def __init__(self, name: str, text: str, values: Mapping[str, FileValue]) -> None:
        self.name, self.text, self.values = name, text, values
        self.where: dict[str, FileValue] = {}
        self._taken: set[str] = set()
        self._left: list[NotCarried] = []
        self._faults: list[LegalityFault] = []

    def given(self, *keys: str) -> FileValue | None:
        """The first of these keys that is there and not "auto" or null; all of them count as taken."""
        found = [self.values[key] for key in keys if key in self.values]
        self._taken |= set(keys)
        return next((item for item in found if item.value is not None and item.value != "auto"), None)

    def whole(self, field: str, *keys: str, least: int = 1, default: Any = None, absent: Sequence[Any] = ()) -> Any:
        """A whole number; `default` where there is none, or one of `absent`, by which the file says so."""
        found = self.given(*keys)
        if found is None or found.value in absent:
            return default
        value = _number(found.value)
        if value is None or value < least:
            raise self.wrong(found, f"a whole number from {least} up")
        self.where[field] = found
        return value

    def true(self, field: str, *keys: str, default: bool = False) -> bool:
        """A truth value, in the words of any of the forms."""
        found = self.given(*keys)
        if found is None:
            return default
        value = {"true": True, "yes": True, "false": False, "no": False}.get(str(found.value).lower())
        if value is None:
            raise self.wrong(found, "true or false")
        self.where[field] = found
        return value

    def word(self, field: str, *keys: str, choices: Mapping[str, Any] | None = None, default: Any = None) -> Any:
        """A text, or what it stands for among `choices`."""
        found = self.given(*keys)
        if found is None:
            return default
        text = str(found.value)
        by_lower = {key.lower(): value for key, value in (choices or {text: text}).items()}
        if text.lower() not in by_lower:
            raise self.wrong(found, f"one of {', '.join(choices or {})}")
        self.where[field] = found
        return by_lower[text.lower()]

    def wrong(self, found: FileValue, expected: str) -> PlanError:
        """What is raised for a value that is none of those."""
        value = str(found.value)
        is_told_later = UNKNOWN.text in value or re.search(r"\$\{?\w+", value)
        remedy = "; put the number in the place of what only running it would tell" if is_told_later else ""
        told = value.replace(UNKNOWN.text, "$…")
        return PlanError(
            f"expected {found.key} as {expected}, found {told!r} in {self.name}, line {found.line}{remedy}"
        )

    def note(self, kind: str, why: str, *keys: str, found: FileValue | None = None) -> None:
        """That something of the file is not as it says in the plan. keys: the first that is there is named."""
        item = found or next((self.values[key] for key in keys if key in self.values), None)
        key, value, line = (item.key, item.value, item.line) if item else ((keys or ("",))[0], "not said", 0)
        self._taken |= {key}
        self._left.append(NotCarried(key, str(value), line, kind, why))

    def fault(self, what: str, expected: str, found: object, remedy: str, *keys: str) -> None:
        """That the framework itself refuses the file. keys: those of them that are there are named."""
        places = [f"{key} (line {self.values[key].line})" for key in keys if key in self.values]
        where = f"{self.name}: {', '.join(places) or 'not said there'}"
        self._faults.append(LegalityFault(what, expected, str(found), where, remedy))

    def file(self, job: TrainingJob, known: Sequence[KnownKey]) -> JobFile:
        """All that was read, when the reader is done: every other key with why no plan carries it."""
        rest = [self._reason(item, known) for key, item in self.values.items() if key not in self._taken]
        order: Callable[[NotCarried], int] = lambda item: item.line  # noqa: E731
        left = tuple(sorted([*self._left, *rest], key=order))
        return JobFile(self.name, self.text, job, dict(self.where), left, tuple(self._faults))

    def _reason(self, item: FileValue, known: Sequence[KnownKey]) -> NotCarried:
        rule = next((rule for rule in known if fnmatchcase(item.key, rule.pattern)), None)
        told = item.key, str(item.value), item.line
        if rule is None:
            return NotCarried(*told, "unknown", "autopar does not know this key, and leaves it as it is")
        if rule.kind == "no equivalent" and any(
            item.value == off and type(item.value) is type(off) for off in rule.off
        ):
            return NotCarried(*told, "does not matter", "off")
        return NotCarried(*told, rule.kind, rule.why)


def _number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number == int(number) else None
