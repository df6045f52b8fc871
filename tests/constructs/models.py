"""Random models with constructs: which, where, how large, and the source of each as a module."""

from __future__ import annotations

import atexit
import importlib.util
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from types import ModuleType

from tests.constructs import changes, functions, losses, python_state, shapes
from tests.constructs.catalog import Construct, by_key

CONSTRUCTS = by_key(
    functions.FUNCTIONS, functions.HOOKS, changes.WRITES, changes.BUFFERS, changes.PARAMETERS, python_state.PYTHON,
    python_state.NAMES, python_state.INPUTS, losses.LOSSES, losses.OUTPUTS, losses.PARTS,
    shapes.SHAPES,
)  # fmt: skip
KINDS = tuple(dict.fromkeys(construct.kind for construct in CONSTRUCTS.values()))
HEADER = """import torch
import torch.nn.functional as F
from torch import nn
"""


@dataclass(frozen=True)
class Used:
    """A construct at its place: "first" or "last" in the model, or in a "layer", of which there are two."""

    construct: str
    place: str
    number: int

    @property
    def what(self) -> Construct:
        return CONSTRUCTS[self.construct]

    @property
    def named_inputs(self) -> dict[str, str]:
        return self.what.named_inputs(self.number)


@dataclass(frozen=True)
class Model:
    """A model of enter, two layers and a head, with constructs; `batch`, `width`, `classes` are its sizes."""

    used: tuple[Used, ...]
    batch: int = 8
    width: int = 8
    classes: int = 6
    seed: int = 0

    @property
    def is_random(self) -> bool:
        return any(used.what.random for used in self.used)

    @property
    def has_loss_fn(self) -> bool:
        return any(used.what.loss_fn for used in self.used)

    @property
    def what(self) -> str:
        """Its constructs, in words."""
        return ", ".join(used.construct for used in self.used)

    @property
    def must_run(self) -> bool:
        return all(used.what.must_run for used in self.used)

    @property
    def source(self) -> str:
        """The module's text: `Model`, `batch()` and `loss_fn`."""
        above = [line for used in self.used for line in used.what.lines("above", used.number)]
        sizes = f"B, D, C = {self.batch}, {self.width}, {self.classes}"
        return "\n".join([HEADER, sizes, *above, "", *self._layer(), "", *self._model(), "", *self._batch(), ""])

    def _layer(self) -> Iterator[str]:
        used = [one for one in self.used if one.place == "layer"]
        names = "".join(f", {name}" for one in used for name in one.named_inputs)
        yield from ("class Layer(nn.Module):", "    def __init__(self):", "        super().__init__()")
        yield "        self.own = nn.Linear(D, D)"
        yield from _indented(used, "init")
        yield from ("", f"    def forward(self, h{self._extra}{names}):", "        h = torch.tanh(self.own(h))")
        yield from _indented(used, "forward")
        yield from _indented(used, "late")
        yield f"        return h{self._extra}"

    def _model(self) -> Iterator[str]:
        first, last, loss = (self._at(place) for place in ("first", "last", "loss"))
        names = "".join(f", {name}" for one in self.used for name in one.named_inputs)
        passed = "".join(f", {name}" for one in self.used if one.place == "layer" for name in one.named_inputs)
        yield from ("class Model(nn.Module):", "    def __init__(self):", "        super().__init__()")
        yield "        self.enter = nn.Linear(6, D)"
        yield from _indented([*first, *last], "init")
        yield "        self.layers = nn.ModuleList(Layer() for _ in range(2))"
        yield "        self.head = nn.Linear(D, C)"
        yield from ("", f"    def forward(self, x{'' if self.has_loss_fn else ', y'}{names}):")
        yield from ["        extra = 0.0"] if self._extra else []
        yield "        h = torch.tanh(self.enter(x))"
        yield from _indented(first, "forward")
        yield from ("        for layer in self.layers:", f"            h{self._extra} = layer(h{self._extra}{passed})")
        yield from _indented(last, "forward")
        yield from _indented([*first, *last], "late")
        yield "        z = self.head(h)"
        if self.has_loss_fn:
            yield from _indented(loss, "returns")
            return
        yield from _indented(loss, "loss") if any(one.what.loss for one in loss) else [_LOSS]
        yield from ["        loss = loss + extra"] if self._extra else []
        yield from _indented(loss, "returns") if any(one.what.returns for one in loss) else ["        return loss"]

    @property
    def _extra(self) -> str:
        """The sum of losses that constructs add, handed through the layers, where one adds to it."""
        return ", extra" if any("extra" in used.what.forward for used in self.used) else ""

    def _at(self, place: str) -> list[Used]:
        return [one for one in self.used if one.place == place]

    def _batch(self) -> Iterator[str]:
        made = {name: text for one in self.used for name, text in one.named_inputs.items()}
        yield from ("def batch():", f"    torch.manual_seed({self.seed} + 1)")
        yield "    x, y = torch.randn(B, 6), torch.randint(C, (B,))"
        own = {"x": "x"} | made | {"y": "y"} if self.has_loss_fn else {"x": "x", "y": "y"} | made
        yield f"    return {{{', '.join(f'{name!r}: {text}' for name, text in own.items())}}}"
        makers = [used.what.loss_fn for used in self.used if used.what.loss_fn]
        yield from ("", "", "def loss_fn():", f"    return {makers[0] if makers else None}")

    @property
    def name(self) -> str:
        """Of its module."""
        return f"constructs_{sha1(self.source.encode()).hexdigest()[:12]}"


_LOSS = "        loss = F.cross_entropy(z, y)"


def _indented(used: Sequence[Used], place: str) -> list[str]:
    return [f"        {line}" for one in used for line in one.what.lines(place, one.number)]


def loaded(name: str, source: str) -> ModuleType:
    """The module anew, in a file of its own, as a user's: programs may import from it by its name."""
    path = _folder() / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="autopar-constructs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.append(str(folder))
    return folder


def random_model(seed: int, kinds: Sequence[str] = KINDS) -> Model:
    """One to four constructs, each kind as often as the others; at most one of them says what the loss is."""
    rng = random.Random(f"model {seed}")
    count = rng.choice([1, 1, 2, 2, 3, 4])
    used: list[Used] = []
    for number in range(count):
        kind = rng.choice(kinds)
        rows = [one for one in CONSTRUCTS.values() if one.kind == kind and _fits(one, used)]
        if rows:
            used.append(placed(rng.choice(rows), number, rng))
    batch, width = rng.choice([8, 8, 8, 4, 6, 7]), rng.choice([8, 8, 6, 7])
    return Model(tuple(used), batch, width, rng.choice([6, 6, 5]), seed)


def placed(construct: Construct, number: int, rng: random.Random) -> Used:
    """A construct at one of its places."""
    if construct.is_loss:
        return Used(construct.key, "loss", number)
    return Used(construct.key, rng.choice(["first", "last", "layer"]), number)


def _fits(construct: Construct, used: Sequence[Used]) -> bool:
    """Whether a model may have the construct, too: one loss, no name twice, nothing added to what a function judges."""
    names = {name for one in used for name in one.what.inputs if "$" not in name}
    if names & set(construct.inputs) or any(
        one.construct == construct.key and "$" not in str(one.what) for one in used
    ):
        return False
    if construct.is_loss and any(one.what.is_loss for one in used):
        return False
    has_extra = any("extra" in one.what.forward for one in used)
    return not (construct.loss_fn and has_extra) and not (
        "extra" in construct.forward and any(one.what.loss_fn for one in used)
    )
