"""What a model keeps in Python, names that meet others, and inputs that are more than tensors."""

from __future__ import annotations

import keyword

from tests.constructs.catalog import Construct


def _python(name: str, init: str, forward: str, late: str = "", **more: object) -> Construct:
    return Construct(name, "python", forward, init=init, late=late, **more)  # type: ignore[arg-type]


PYTHON = (
    _python("a counter that warms up", "self.step$i = 0", "self.step$i += 1\nh = h * min(1.0, self.step$i / 3)"),
    _python("a counter that nothing reads", "self.calls$i = 0", "self.calls$i += 1"),
    _python("a flag of the first call", "self.first$i = True",
            "if self.first$i:\n    h = h * 2\n    self.first$i = False"),
    _python("a flag that flips", "self.odd$i = False", "self.odd$i = not self.odd$i\nh = h + 0.1 if self.odd$i else h"),
    _python("a list that grows", "self.log$i = []", "self.log$i.append(h.detach().mean())"),
    _python("a list whose length matters", "self.log$i = []", "self.log$i.append(1)\nh = h / len(self.log$i)"),
    _python("a schedule that is used up", "self.rates$i = [0.1, 0.2, 0.4, 0.8] * 40", "h = h * self.rates$i.pop(0)"),
    _python("the last activation used in the next step", "self.last$i = None",
            "h = h + (0 if self.last$i is None else self.last$i)\nself.last$i = h.detach().mean(0)"),
    _python("the last activation kept for others", "self.last$i = None", "self.last$i = h.detach()"),
    _python("a table cached at the first call", "self.table$i = None",
            "if self.table$i is None:\n    self.table$i = torch.linspace(0, 1, D).double()\nh = h + self.table$i",
            must_run=True),
    _python("the first activation cached", "self.first$i = None",
            "if self.first$i is None:\n    self.first$i = h.detach().mean(0)\nh = h + self.first$i"),
    _python("the first input cached by length", "self.firsts$i = {}",
            "h = h * self.firsts$i.setdefault(h.shape[0], h.detach().abs().amax(0))"),
    _python("a weight cached", "self.w$i = nn.Linear(D, D)\nself.held$i = []", """
if not self.held$i:
    self.held$i.append(self.w$i.weight.detach().t().clone())
h = self.w$i(h) @ self.held$i[0]
"""),
    _python("a buffer that was None, filled by the first activation", 'self.register_buffer("none$i", None)',
            "if self.none$i is None:\n    self.none$i = h.detach().mean(0)\nh = h - self.none$i"),
    _python("a buffer that was None, filled by a table", 'self.register_buffer("none$i", None, persistent=False)', """
if self.none$i is None or self.none$i.shape[0] < D:
    self.none$i = torch.arange(D).to(h) / D
h = h - self.none$i[:D]
""", must_run=True),
    _python("a cache by length", "self.tables$i = {}", """
if h.shape[1] not in self.tables$i:
    self.tables$i[h.shape[1]] = torch.arange(h.shape[1]).double() / D
h = h * self.tables$i[h.shape[1]]
""", must_run=True),
    _python("a cached function", "pass", "h = h + table$i(D)", above="""
import functools
@functools.lru_cache
def table$i(n):
    return torch.arange(n).double() * 0.1
""", must_run=True),
    _python("a value set and put back", "self.scale$i = 1.0", """
held$i, self.scale$i = self.scale$i, 2.0
h = h * self.scale$i
self.scale$i = held$i
""", must_run=True),
    _python("a counter of the class", "pass", "Kept$i.calls += 1\nh = h * (1 + 0.1 * Kept$i.calls)", above="""
class Kept$i:
    calls = 0
"""),
    _python("a global counter", "pass", "bump$i()\nh = h + 0.1 * CALLS$i[0]", above="""
CALLS$i = [0]
def bump$i():
    CALLS$i[0] += 1
"""),
    _python("a default argument that remembers", "pass", "h = remember$i(h)", above="""
def remember$i(h, seen=[]):
    seen.append(1)
    return h * (1 + 0.1 * len(seen))
"""),
    _python("a generator of factors", "self.factors$i = iter([1.0, 0.5, 0.25, 0.125] * 40)",
            "h = h * next(self.factors$i)"),
    _python("a choice by Python's random numbers", "pass", "h = h * random.choice([0.5, 1.0, 2.0])",
            above="import random"),
    _python("a branch on training", "pass", "h = h * 2 if self.training else h", must_run=True),
    _python("a branch on a shape", "pass", "h = h * 2 if h.shape[1] % 2 else h + 1", must_run=True),
    _python("a branch on a value", "pass", "h = h * 2 if h.sum() > 0 else h + 1"),
    _python("a value taken to Python", "pass", "h = h * (1 + float(h.detach().mean()))"),
    _python("a branch that switches a layer off after two steps", "self.n$i = 0\nself.l$i = nn.Linear(D, D)",
            "self.n$i += 1\nif self.n$i <= 2:\n    h = torch.tanh(self.l$i(h))"),
    _python("a layer frozen in forward", "self.l$i = nn.Linear(D, D)",
            "self.l$i.requires_grad_(False)\nh = torch.tanh(self.l$i(h))"),
    _python("a layer frozen after the first step", "self.n$i = 0\nself.l$i = nn.Linear(D, D)",
            "self.n$i += 1\nself.l$i.requires_grad_(self.n$i < 2)\nh = torch.tanh(self.l$i(h))"),
    _python("an attribute of a submodule counted", "self.l$i = nn.Linear(D, D)\nself.l$i.uses = 0",
            "self.l$i.uses += 1\nh = self.l$i(h) / self.l$i.uses"),
    _python("a tensor that is neither parameter nor buffer", "self.c$i = torch.linspace(0.5, 1, D)", "h = h * self.c$i",
            must_run=True),
    _python("a tensor in a list that is written", "self.c$i = [torch.zeros(D)]",
            "h = h - self.c$i[0]\nself.c$i[0].add_(h.detach().mean(0))"),
    _python("a tensor in a list that is replaced", "self.c$i = [torch.zeros(D)]",
            "h = h - self.c$i[0]\nself.c$i[0] = h.detach().mean(0)"),
    _python("an index that wraps", "self.at$i = 0",
            "h = h * [0.5, 1.0, 2.0][self.at$i]\nself.at$i = (self.at$i + 1) % 3"),
    _python("state in a dataclass", "self.state$i = State$i()",
            "self.state$i.n += 1\nh = h / self.state$i.n", above="""
import dataclasses
@dataclasses.dataclass
class State$i:
    n: int = 0
"""),
    _python("a generator function of factors", "self.factors$i = factors$i()", "h = h * next(self.factors$i)", above="""
def factors$i():
    factor = 1.0
    while True:
        yield factor
        factor *= 0.9
"""),
    _python("a generator that repeats itself for a while", "self.factors$i = (f for f in [1.0] * 2 + [0.3] * 200)",
            "h = h * next(self.factors$i)"),
    _python("a count of itertools", "self.count$i = itertools.count(1)", "h = h / next(self.count$i)",
            above="import itertools"),
    _python("a cycle of itertools", "self.turn$i = itertools.cycle([0.5, 1.0])", "h = h * next(self.turn$i)",
            above="import itertools"),
    _python("an iterator that nothing takes from", "self.left$i = iter([1.0, 0.5])", "h = h * 0.5", must_run=True),
    _python("an attribute of a function", "pass", "h = counted$i(h)", above="""
def counted$i(h):
    counted$i.calls += 1
    return h / counted$i.calls
counted$i.calls = 0
"""),
    _python("a class that counts by a method", "pass", "h = h * Clock$i.tick()", above="""
class Clock$i:
    now = 0
    @classmethod
    def tick(cls):
        cls.now += 1
        return 1 / cls.now
"""),
    _python("a cached method", "self.c$i = Cached$i()", "h = h + self.c$i.table(D)", above="""
import functools
class Cached$i:
    @functools.lru_cache(maxsize=None)
    def table(self, n):
        return torch.arange(n).double() * 0.1
""", must_run=True),
    _python("a cached property", "self.c$i = Lazy$i()", "h = h + self.c$i.table", above="""
import functools
class Lazy$i:
    @functools.cached_property
    def table(self):
        return torch.arange(D).double() * 0.1
""", must_run=True),
    _python("a numpy array that is written", "self.n$i = np.ones(3)",
            "self.n$i += 1\nh = h / float(self.n$i[1])", above="import numpy as np"),
    _python("a numpy array that is read", "self.n$i = np.linspace(0.5, 1, 3)", "h = h * float(self.n$i[1])",
            above="import numpy as np", must_run=True),
    _python("state in slots", "self.s$i = Slots$i()", "self.s$i.n += 1\nh = h / self.s$i.n", above="""
class Slots$i:
    __slots__ = ("n",)
    def __init__(self):
        self.n = 0
"""),
    _python("state in a dict of its own class", "self.s$i = Dict$i(n=0)", "self.s$i['n'] += 1\nh = h / self.s$i['n']",
            above="class Dict$i(dict):\n    pass"),
    _python("state in a closure", "self.s$i = counter$i()", "h = h / self.s$i()", above="""
def counter$i():
    n = 0
    def tick():
        nonlocal n
        n += 1
        return n
    return tick
"""),
    _python("a set of what was seen", "self.seen$i = set()",
            "h = h * (1 if h.shape in self.seen$i else 2)\nself.seen$i.add(h.shape)"),
    _python("a queue of activations", "self.queue$i = deque(maxlen=2)",
            "h = h - sum(self.queue$i)\nself.queue$i.append(h.detach().mean(0) * 0.1)",
            above="from collections import deque"),
    _python("a global variable set anew", "pass", "h = anneal$i(h)", above="""
RATE$i = 1.0
def anneal$i(h):
    global RATE$i
    RATE$i *= 0.9
    return h * RATE$i
"""),
    _python("a global tensor", "pass", "h = h * SCALE$i", above="SCALE$i = torch.linspace(0.5, 1, D)", must_run=True),
    _python("a global tensor that is written", "pass", "h = h * SCALE$i.clone()\nSCALE$i.mul_(0.9)",
            above="SCALE$i = torch.linspace(0.5, 1, D)"),
    _python("the time", "pass", "h = h * (1 + time.perf_counter_ns() % 7)", above="import time"),
    _python("the environment", "pass", "h = h * float(os.environ.get('NOT_SET$i', '0.5'))", above="import os",
            must_run=True),
    _python("a number of numpy's", "pass", "h = h * float(np.random.rand())", above="import numpy as np"),
    _python("a generator of numpy's made in forward", "pass", "h = h * np.random.default_rng().random()",
            above="import numpy as np"),
    _python("a generator of numpy's with a seed", "self.rng$i = np.random.default_rng(1)",
            "h = h * self.rng$i.random()", above="import numpy as np"),
    _python("a branch on whether gradients are made", "pass", "h = h * 2 if torch.is_grad_enabled() else h",
            must_run=True),
    _python("an exception that is caught", "pass", """
try:
    h = h * self.missing$i
except AttributeError:
    h = h * 0.5
""", must_run=True),
    _python("a warning given once", "self.warned$i = False", """
if not self.warned$i:
    warnings.warn("shown once")
    self.warned$i = True
h = h * 0.5
""", above="import warnings", must_run=True),
    _python("time taken and logged", "self.times$i = []", """
began$i = time.perf_counter()
h = h * 0.5
self.times$i.append(time.perf_counter() - began$i)
""", above="import time", must_run=True),
)  # fmt: skip

#: like operators, inputs, values of the model, the runtime's attributes, Python's words, or no identifiers at all
_NAMES = (
    "mean", "mul", "mul_1", "linear", "add", "sum_1", "tanh", "cross_entropy", "detach", "clone", "view", "relu",
    "x", "y", "h", "loss", "logits", "labels", "inputs", "args", "kwargs", "input_ids", "output", "_0", "t",
    "microbatch", "microbatches", "count", "axes", "update", "prepare", "mesh", "program", "rank", "ranks", "stage",
    "stages", "plan", "block", "blocks", "schedule", "dp", "tp", "z", "rt", "torch", "nn", "F", "math", "self_",
    "weights",
    "local", "state", "batch", "placement", "group", "size", "index", "name", "names", "redistribute", "gather",
    "num_ranks", "timeout_s", "train_step", "stored_parameters", "full_gradients", "clip_grad_norm_", "init_from",
    "unite_tied", "batches", "optimizer", "_locals", "_state", "_mesh", "_step", "_cache", "parts", "constants",
    "sum", "len", "list", "int", "id", "max", "min", "print", "Tensor", "Program", "Block", "Model", "Layer",
    "class", "None", "lambda", "import", "a-b", "0", "with space", "größe", "__name", "_", "data", "grad", "dtype",
    "mutations", "outputs", "buffers_", "parameters_", "param", "buffer", "stored", "tied", "training_", "compile_",
)  # fmt: skip


def _collisions() -> tuple[Construct, ...]:
    found = []
    for name in _NAMES:
        get, can_run = f"getattr(self, {name!r})", not keyword.iskeyword(name)
        found += [
            Construct(f"a parameter called {name}", "name", f"h = h * {get}", must_run=can_run,
                      init=f"self.register_parameter({name!r}, nn.Parameter(torch.rand(D) + 0.5))"),
            Construct(f"a buffer called {name}", "name", f"h = h + {get}", must_run=can_run,
                      init=f"self.register_buffer({name!r}, torch.rand(D))"),
            Construct(f"a buffer called {name} that is updated", "name",
                      f"with torch.no_grad():\n    {get}.add_(h.mean(0))\nh = h - {get}",
                      init=f"self.register_buffer({name!r}, torch.zeros(D))"),
            Construct(f"a submodule called {name}", "name", f"h = {get}(h)", must_run=can_run,
                      init=f"self.add_module({name!r}, nn.Linear(D, D))"),
        ]  # fmt: skip
        if name.isidentifier() and not keyword.iskeyword(name) and name not in _TAKEN and name[:2] != "__":
            found.append(Construct(f"an input called {name}", "name", f"h = h * {name}", must_run=True,
                                   inputs={name: "torch.rand(B, D)"}))  # fmt: skip
            found.append(Construct(f"an input and a parameter called {name}", "name", f"h = h * {name} + {get}",
                                   init=f"self.register_parameter({name!r}, nn.Parameter(torch.rand(B, D)))",
                                   inputs={name: "torch.rand(B, D)"}, must_run=True))  # fmt: skip
    return tuple(found)


#: what the lines of a model use themselves
_TAKEN = {"x", "y", "h", "z", "torch", "nn", "F", "B", "D", "C", "loss", "float", "range", "random", "min", "len"}

NAMES = (
    *_collisions(),
    Construct("a parameter called like the input that it scales", "name", "h = h * self.q$i * q$i",
              init="self.q$i = nn.Parameter(torch.rand(B, D))", inputs={"q$i": "torch.rand(B, D)"}, must_run=True),
    Construct("a submodule called like an input", "name", "h = self.q$i(h) + q$i",
              init="self.q$i = nn.Linear(D, D)", inputs={"q$i": "torch.rand(B, D)"}, must_run=True),
    Construct("names that differ in dots and underscores", "name", "h = h * self.a$i.b * self.a${i}_b", init="""
self.a$i = nn.Module()
self.a$i.b = nn.Parameter(torch.rand(D) + 0.5)
self.a${i}_b = nn.Parameter(torch.rand(D) + 0.5)
""", must_run=True),
    Construct("names that differ in case", "name", "h = h * self.W$i + self.w$i", init="""
self.W$i, self.w$i = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D))
""", must_run=True),
    Construct("a sequence whose parts have names", "name", "h = self.s$i(h)", init="""
self.s$i = nn.Sequential(OrderedDict([("fc-1", nn.Linear(D, D)), ("relu", nn.ReLU()), ("2", nn.Linear(D, D))]))
""", above="from collections import OrderedDict", must_run=True),
    Construct("parameters in a dict", "name", "h = h * self.d$i['mul'] + self.d$i['x']", init="""
self.d$i = nn.ParameterDict({"mul": nn.Parameter(torch.rand(D)), "x": nn.Parameter(torch.rand(D))})
""", must_run=True),
    Construct("classes called like the runtime's", "name", "h = self.p$i(h)", above="""
class Program(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.mesh = nn.Parameter(torch.rand(n))
    def forward(self, x):
        return x * self.mesh
""", init="self.p$i = Program(D)", must_run=True),
)  # fmt: skip


def _input(name: str, inputs: dict[str, str], forward: str, **more: object) -> Construct:
    return Construct(name, "input", forward, inputs=inputs, **more)  # type: ignore[arg-type]


_ROWS = "torch.rand(B, D)"

INPUTS = (
    _input("a dict of tensors", {"q$i": f"{{'a': {_ROWS}, 'b': {_ROWS}}}"}, "h = h * q$i['a'] + q$i['b']"),
    _input("a list of tensors", {"q$i": f"[{_ROWS}, {_ROWS}]"}, "h = h * q$i[0] - q$i[1]"),
    _input("a tuple of tensors", {"q$i": f"({_ROWS}, {_ROWS})"}, "h = h * q$i[0] - q$i[1]"),
    _input("lists in dicts", {"q$i": f"{{'a': [{_ROWS}, {{'b': {_ROWS}}}]}}"},
           "h = h * q$i['a'][0] + q$i['a'][1]['b']"),
    _input("None", {"q$i": "None"}, "h = h if q$i is None else h * q$i", must_run=True),
    _input("None in a dict", {"q$i": f"{{'a': None, 'b': {_ROWS}}}"},
           "h = h if q$i['a'] is not None else h * q$i['b']"),
    _input("an integer", {"q$i": "3"}, "h = h * q$i", must_run=True),
    _input("a number", {"q$i": "0.5"}, "h = h * q$i", must_run=True),
    _input("a flag", {"q$i": "True"}, "h = h * 2 if q$i else h", must_run=True),
    _input("a string", {"q$i": "'tanh'"}, "h = getattr(torch, q$i)(h)"),
    _input("numbers in a dict", {"q$i": f"{{'a': {_ROWS}, 'k': 2, 'on': True}}"}, "h = h * q$i['a'] * q$i['k']"),
    _input("a dataclass", {"q$i": f"Rows$i({_ROWS}, 2)"}, "h = h * q$i.a * q$i.k", above="""
import dataclasses
@dataclasses.dataclass
class Rows$i:
    a: torch.Tensor
    k: int
"""),
    _input("a named tuple", {"q$i": f"Pair$i({_ROWS}, {_ROWS})"}, "h = h * q$i.a + q$i.b", above="""
import collections
Pair$i = collections.namedtuple("Pair$i", "a b")
"""),
    _input("a mask of samples", {"q$i": "torch.rand(B) > 0.4"}, "h = h * q$i[:, None]", must_run=True),
    _input("a scalar tensor", {"q$i": "torch.tensor(0.7)"}, "h = h * q$i"),
    _input("a vector that is not of samples", {"q$i": "torch.rand(D)"}, "h = h * q$i"),
    _input("an integer tensor", {"q$i": "torch.randint(5, (B,))"}, "h = h * q$i[:, None]", must_run=True),
    _input("one that nothing reads", {"q$i": _ROWS}, "pass", must_run=True),
    _input("one with a leading dim of its own", {"q$i": "torch.rand(3, B, D)"}, "h = h * q$i.sum(0)"),
    _input("one in single precision", {"q$i": "torch.rand(B, D, dtype=torch.float32)"}, "h = h * q$i", must_run=True),
    _input("one with gradients of its own", {"q$i": f"{_ROWS}.requires_grad_()"}, "h = h * q$i"),
    _input("an empty list", {"q$i": "[]"}, "h = h + len(q$i)"),
)  # fmt: skip
