"""Shell scripts as data: the words of the command that trains, with each character's place in the text. Nothing is run.

Read are plain assignments (`TP=8`, `ARGS=(…)`, `ARGS+=(…)`, `export`), what expands to them (`$TP`, `${TP:-8}`,
`${ARGS[@]}`, `$((8 * 2))`), and conditions of strings (`if [[ "$TP" == 8 ]]`). Values of commands, of positional
parameters and of the environment are unknown; branches that depend on them are left out, and named.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Character(NamedTuple):
    """Of an expanded word: where it stands in the script, None where it was computed; is_quoted: does not split
    words."""

    text: str
    place: int | None = None
    is_quoted: bool = False


Characters = tuple[Character, ...]
UNKNOWN = Character("\ufffd")
"""In the place of what only running the script would tell."""


@dataclass(frozen=True)
class Word:
    """A word of a command: its text, and where it stands when it is one piece of the script."""

    text: str
    span: tuple[int, int] | None

    @property
    def is_known(self) -> bool:
        """Whether nothing of it would be told by running the script alone."""
        return UNKNOWN.text not in self.text


class ScriptCommand(NamedTuple):
    """words, and where the next one would be put: before a pipe, a redirection or the end."""

    words: list[Word]
    end: int


@dataclass
class Script:
    """What a script comes to."""

    commands: list[ScriptCommand] = field(default_factory=list)
    not_followed: list[tuple[int, str]] = field(default_factory=list)  # places, and what stands there


def word_of(characters: Characters) -> Word:
    """A word from its characters."""
    places = [one.place for one in characters]
    is_piece = (
        bool(places) and None not in places and places == list(range(places[0] or 0, (places[0] or 0) + len(places)))
    )
    span = (places[0], places[-1] + 1) if is_piece else None  # type: ignore[operator]
    return Word("".join(one.text for one in characters), span)  # type: ignore[arg-type]


def read_script(text: str) -> Script:
    """The commands of a script, expanded."""
    return _Interpreter(text).run()


# Statements ----------------------------------------

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ENDS = ";\n&|"
_OPENING, _CLOSING = ("for", "while", "until", "case", "select"), ("done", "esac")


class _Interpreter:
    """Goes through a script once, from its begin to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._values: dict[str, Characters] = {}
        self._arrays: dict[str, list[Characters]] = {}
        self._script = Script()
        self._branches: list[tuple[bool, bool]] = []  # of each `if`: whether this branch counts, whether one did
        self._loops = 0

    def run(self) -> Script:
        while self._at < len(self._text):
            self._statement()
        return self._script

    @property
    def _counts(self) -> bool:
        return not self._loops and all(counts for counts, _ in self._branches)

    def _statement(self) -> None:
        self._skip_blanks(and_ends=True)
        start = self._at
        word = _NAME.match(self._text, start)
        name = word[0] if word else ""
        if name in _OPENING and self._is_whole(name):
            self._note(start)
            self._loops += 1
            self._at += len(name)
        elif name in _CLOSING and self._is_whole(name):
            self._loops = max(0, self._loops - 1)
            self._at += len(name)
        elif name in ("if", "elif", "else", "fi") and self._is_whole(name):
            self._branch(name, start)
        elif name in ("then", "do", "export", "declare", "local", "readonly") and self._is_whole(name):
            self._at += len(name)
        elif match := _ASSIGNED.match(self._text, start):
            self._assign(match)
        elif start < len(self._text):
            self._command()
        if self._at == start and self._at < len(self._text):
            self._at += 1

    def _is_whole(self, name: str) -> bool:
        end = self._at + len(name)
        return end == len(self._text) or self._text[end] in " \t\n;"

    def _note(self, start: int) -> None:
        if self._counts:
            line = self._text[start:].split("\n", 1)[0].strip()
            self._script.not_followed.append((start, line))

    def _assign(self, match: re.Match[str]) -> None:
        name, is_more = match[1], bool(match[2])
        self._at = match.end()
        if self._text[self._at : self._at + 1] == "(":
            self._at += 1
            words = self._words(")")
            self._at += 1
            if self._counts:
                self._arrays[name] = [*self._arrays.get(name, []), *words] if is_more else words
            return
        words = self._words(_ENDS + " \t", most=1)
        value = words[0] if words else ()
        if self._counts:
            self._values[name] = (*self._values.get(name, ()), *value) if is_more else value

    def _command(self) -> None:
        words, end = self._words(_ENDS), self._at
        while self._text[self._at : self._at + 1] in tuple("&|>"):  # the rest of a line belongs to it
            self._at += 1
            self._words(_ENDS)
        if self._counts and words:
            if self._text[end : end + 1] in tuple("<>") and words[-1][-1:] and words[-1][0].place == end - 1:
                words, end = words[:-1], end - 1  # 2> or 1>
            trimmed = len(self._text[:end].rstrip(" \t\\\n"))
            self._script.commands.append(ScriptCommand([word_of(one) for one in words], trimmed))

    # Conditions

    def _branch(self, name: str, start: int) -> None:
        self._at += len(name)
        if name == "fi":
            self._branches[-1:] = []
        elif name == "else":
            if self._branches:
                _, done = self._branches[-1]
                self._branches[-1] = (not done, True)
        else:
            condition = self._condition()
            if condition is None:
                self._note(start)
            if name == "if":
                self._branches.append((bool(condition), condition is None or condition))
            elif self._branches:
                _, done = self._branches[-1]
                self._branches[-1] = (bool(condition) and not done, done or condition is None or bool(condition))

    def _condition(self) -> bool | None:
        """What a test of strings comes to, None where only running it would tell."""
        end = re.compile(r"(;|\n)\s*then\b").search(self._text, self._at)
        stop = end.start() if end else len(self._text)
        text, self._text = self._text, self._text[:stop]
        tests = list[bool | None]()
        joins = list[str]()
        while self._at < stop:
            words = [word_of(one) for one in self._words("&|;\n")]
            tests.append(_test([word.text for word in words], all(word.is_known for word in words)))
            joins.append(self._text[self._at : self._at + 2])
            self._at += 2
        self._text, self._at = text, stop
        return _joined(tests, joins)

    # Words

    def _skip_blanks(self, and_ends: bool = False) -> None:
        skipped = " \t" + (_ENDS + "(){}!" if and_ends else "")
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] in skipped:
                self._at += 1
            elif self._text[self._at] == "#" and (self._at == 0 or self._text[self._at - 1] in " \t\n;("):
                self._at = (self._text.find("\n", self._at) + 1 or len(self._text) + 1) - 1
            else:
                return

    def _words(self, ends: str, most: int = 1 << 30) -> list[Characters]:
        """Words up to an unquoted end, expanded and split."""
        found = list[Characters]()
        while len(found) < most:
            if most > 1:
                self._skip_blanks()
            while ends == ")" and self._text[self._at : self._at + 1] == "\n":
                self._at += 1
                self._skip_blanks()
            if self._at >= len(self._text) or self._text[self._at] in ends:
                break
            if self._text[self._at] in "<>" and not self._text.startswith("<(", self._at):
                break
            before = self._at
            found += self._word(ends, splits=most > 1)
            if self._at == before:
                self._at += 1
            if most == 1:
                break
        return found

    def _word(self, ends: str, splits: bool) -> list[Characters]:
        parts, quote, is_empty_word = list[Character](), "", False
        while self._at < len(self._text):
            at, one = self._at, self._text[self._at]
            if self._text.startswith("\\\n", at):
                self._at += 2
                if not quote:
                    break
            elif one == "\\" and quote != "'" and at + 1 < len(self._text):
                parts.append(Character(self._text[at + 1], None, True))
                self._at += 2
            elif quote and one == quote:
                quote, self._at = "", at + 1
            elif not quote and one in "\"'":
                quote, is_empty_word, self._at = one, True, at + 1
            elif quote != "'" and one in "$`":
                parts += self._expansion(bool(quote))
            elif not quote and (one in " \t\n" or one in ends or one in ";&|<>)"):
                break
            else:
                parts.append(Character(one, at, bool(quote)))
                self._at += 1
        words = _split(parts) if splits else [tuple(parts)]
        return words or ([()] if is_empty_word else [])

    # Expansions

    def _expansion(self, is_quoted: bool) -> list[Character]:
        at, text = self._at, self._text
        if text.startswith("$((", at):
            end = _closing(text, at + 3, "(", ")")
            self._at = end + 2
            return _computed(self._arithmetic(text[at + 3 : end]))
        if text.startswith("$(", at):
            self._at = _closing(text, at + 2, "(", ")") + 1
            return [UNKNOWN]
        if text[at] == "`":
            self._at = (text.find("`", at + 1) + 1) or len(text)
            return [UNKNOWN]
        if text.startswith("${", at):
            end = _closing(text, at + 2, "{", "}")
            self._at = end + 1
            return self._braced(at + 2, end, is_quoted)
        if name := _NAME.match(text, at + 1):
            self._at = name.end()
            return self._value(name[0], is_quoted)
        if at + 1 < len(text) and text[at + 1] in "0123456789@*#?$!":
            self._at = at + 2
            return [UNKNOWN]
        self._at = at + 1
        return [Character("$", at, is_quoted)]

    def _braced(self, start: int, end: int, is_quoted: bool) -> list[Character]:
        inside = self._text[start:end]
        match = re.match(r"([A-Za-z_]\w*|\d+)(\[[@*]\])?(:?[-=])?", inside)
        if match is None or (match.end() != len(inside) and not match[3]):
            return [UNKNOWN]
        if match[2]:
            words = self._arrays.get(match[1], [])
            blank = Character(" ")  # not quoted: also "${ARGS[@]}" gives a word for each element
            return [one for word in words for one in (*_requoted(word, is_quoted), blank)][:-1]
        value = self._value(match[1], is_quoted) if match[1] in self._values else []
        if match[3] and not value:
            return self._default(start + match.end(), end, is_quoted)
        return value or [UNKNOWN]

    def _default(self, start: int, end: int, is_quoted: bool) -> list[Character]:
        back, whole = self._at, self._text
        self._at, self._text = start, whole[:end]
        words = self._words("", most=1)
        self._at, self._text = back, whole
        return list(_requoted(words[0], is_quoted)) if words else []

    def _value(self, name: str, is_quoted: bool) -> list[Character]:
        if name in self._arrays and name not in self._values:
            first = self._arrays[name][:1]
            return list(_requoted(first[0], is_quoted)) if first else []
        if name not in self._values:
            return [UNKNOWN]
        return [Character(one.text, one.place, is_quoted) for one in self._values[name]]

    def _arithmetic(self, text: str) -> int | None:
        def number(match: re.Match[str]) -> str:
            value = "".join(one.text for one in self._values.get(match[1], (UNKNOWN,)))
            return value if re.fullmatch(r"\d+", value) else "x"

        return _calculated(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, text))


def _requoted(word: Characters, is_quoted: bool) -> Characters:
    """An expanded word keeps together only where it is expanded in quotes."""
    return tuple(one._replace(is_quoted=is_quoted) for one in word)


def _split(parts: list[Character]) -> list[Characters]:
    """Words between unquoted blanks. Elements of arrays, expanded without quotes, are split as well."""
    words, word = list[Characters](), list[Character]()
    for one in parts:
        is_blank = one.text in " \t\n" and not one.is_quoted
        if is_blank and word:
            words.append(tuple(word))
            word = []
        elif not is_blank:
            word.append(one)
    return [*words, tuple(word)] if word else words


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth = 1
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place
    return len(text)


def _computed(value: int | None) -> list[Character]:
    return [UNKNOWN] if value is None else [Character(one) for one in str(value)]


_OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _calculated(text: str) -> int | None:
    """Sums, products and quotients of whole numbers."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body) if len(text) < 200 else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _test(words: list[str], is_known: bool) -> bool | None:
    """[[ a == b ]], [ -n a ], [ -z a ] of known strings."""
    if not is_known or len(words) < 3 or words[0] not in ("[", "[["):
        return None
    inner = words[1 : -1 if words[-1] in ("]", "]]") else None]
    if len(inner) == 3 and inner[1] in ("==", "=", "-eq", "!=", "-ne"):
        return (inner[0] == inner[2]) == (inner[1] in ("==", "=", "-eq"))
    if inner[0] in ("-n", "-z") and len(inner) <= 2:
        return bool("".join(inner[1:])) == (inner[0] == "-n")
    return None


def _joined(tests: list[bool | None], joins: list[str]) -> bool | None:
    found = tests[0] if tests else None
    for test, join in zip(tests[1:], joins, strict=False):
        if join == "||":
            found = True if found or test else None if None in (found, test) else False
        elif join == "&&":
            found = False if found is False or test is False else None if None in (found, test) else True
        else:
            return None
    return found
