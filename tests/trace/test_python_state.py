"""A forward that does something else at its next call is refused, on meta tensors too; a cache is not."""

from __future__ import annotations

import datetime as datetime_module
import functools
import gc
import itertools
import logging
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from time import time as now
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import held_against_eager, python_state, trace

COUNT = {"calls": 0}
DATED = datetime.now()
TOTAL = 0


class Step:
    """An object of the user's that a model holds."""

    def __init__(self) -> None:
        self.number, self.history = 0, list[int]()


class Held(nn.Module):
    """A layer, and a function of the module and what the layer makes."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()


class Inner(nn.Module):
    shared = 0

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.calls, self.rate, self.flag, self.log, self.step = 0, 1.0, False, list[float](), Step()
        self.cache: Any = None
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("empty", None, persistent=False)
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))


def _counter(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def _decay(m: Any, h: Tensor) -> Tensor:
    m.rate *= 0.99
    return h * m.rate


def _alternating(m: Any, h: Tensor) -> Tensor:
    m.flag = not m.flag
    return h.relu() if m.flag else h.tanh()


def _growing(m: Any, h: Tensor) -> Tensor:
    m.log.append(1.0)
    return h / len(m.log)


def _object(m: Any, h: Tensor) -> Tensor:
    m.step.number += 1
    return h.roll(m.step.number, 0)


def _inside_object(m: Any, h: Tensor) -> Tensor:
    m.step.history.append(2)
    return h + sum(m.step.history)


def _warm_up(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h.detach() if m.calls > 500 else h * 2


def _every_thousand(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h.detach() + h if m.calls % 1000 == 0 else h * 2


def _global_dict(m: Any, h: Tensor) -> Tensor:
    COUNT["calls"] += 1
    return h * COUNT["calls"]


def _global_number(m: Any, h: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return h * TOTAL


def _of_class(m: Any, h: Tensor) -> Tensor:
    type(m).shared += 1
    return h * m.shared


def _closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def function(m: Any, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return function


def _first_only(m: Any, h: Tensor) -> Tensor:
    first, m.flag = not m.flag, True
    return h if first else h * 0.5


def _by_chance(m: Any, h: Tensor) -> Tensor:
    return h.relu() if random.random() < 0.5 else h.tanh()


def _noise(m: Any, h: Tensor) -> Tensor:
    return h + torch.from_numpy(np.random.randn(4)).float().to(h.device) if not h.is_meta else h * np.random.rand()


def _by_clock(m: Any, h: Tensor) -> Tensor:
    return h * (1 + time.perf_counter_ns() % 7)


def _by_hour(m: Any, h: Tensor) -> Tensor:
    return h.relu() if int(now() // 3600) % 2 else h.tanh()


def _by_date(m: Any, h: Tensor) -> Tensor:
    return h * (1 + datetime.now(tz=datetime_module.UTC).microsecond % 7)


def _by_day(m: Any, h: Tensor) -> Tensor:
    return h.relu() if datetime_module.date.today().toordinal() % 2 else h.tanh()


def _by_local_time(m: Any, h: Tensor) -> Tensor:
    return h.relu() if time.localtime().tm_yday % 2 else h.tanh()


def _by_entropy(m: Any, h: Tensor) -> Tensor:
    return h * (1 + secrets.randbelow(3))


def _generator(m: Any, h: Tensor) -> Tensor:
    return h * torch.rand(4, generator=m.generator)


def _seed(m: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand_like(h)


def _frozen(m: Any, h: Tensor) -> Tensor:
    m.layer.weight.requires_grad_(False)
    return m.layer(h)


def _frozen_by_attribute(m: Any, h: Tensor) -> Tensor:
    m.layer.bias.requires_grad = False
    return m.layer(h)


def _default(m: Any, h: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return h / len(seen)


def _attribute(m: Any, h: Tensor) -> Tensor:
    vars(_attribute)["calls"] = vars(_attribute).get("calls", 0) + 1
    return h / vars(_attribute)["calls"]


class Clock:
    now = 0


def _of_namespace(m: Any, h: Tensor) -> Tensor:
    Clock.now += 1
    return h / Clock.now


FACTORS = itertools.cycle((1.0, 1.0, 1.0, 0.5))
RATES = (rate for rate in [1.0] * 9 + [0.5] * 9)
ROW = np.ones(2)


def _iterator(m: Any, h: Tensor) -> Tensor:
    return h * next(FACTORS)


def _generated(m: Any, h: Tensor) -> Tensor:
    return h * next(RATES)


def _array(m: Any, h: Tensor) -> Tensor:
    ROW[0] += 1
    return h / float(ROW[0])


def _first_activation(m: Any, h: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = h.detach().mean(0)
    return h + m.cache


def _first_weight(m: Any, h: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = {"weight": m.layer.weight.detach().clone()}
    return h @ m.cache["weight"]


def _first_of_what_changes(m: Any, h: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = m.seen * 2
    m.seen.add_(1)
    return h * m.cache


def _first_kept_as_a_buffer(m: Any, h: Tensor) -> Tensor:
    if m.empty is None:
        m.empty = h.detach().amax(0)
    return h + m.empty


def _of_the_step_before(m: Any, h: Tensor) -> Tensor:
    before, m.empty = m.empty, h.detach().amax(0)
    return h if before is None else h + before


BY_MODEL: Any = weakref.WeakKeyDictionary()
LOCAL, SPACE = threading.local(), SimpleNamespace(first=None)
CONTEXT: ContextVar[Any] = ContextVar("CONTEXT", default=None)


def _by_model(m: Any, h: Tensor) -> Tensor:
    return h + BY_MODEL.setdefault(m, h.detach().mean(0))


def _of_thread(m: Any, h: Tensor) -> Tensor:
    if not hasattr(LOCAL, "first"):
        LOCAL.first = h.detach().mean(0)
    return h + LOCAL.first


def _of_context(m: Any, h: Tensor) -> Tensor:
    if CONTEXT.get() is None:
        CONTEXT.set(h.detach().mean(0))
    return h + CONTEXT.get()


def _of_space(m: Any, h: Tensor) -> Tensor:
    if SPACE.first is None:
        SPACE.first = h.detach().mean(0)
    return h + SPACE.first


def _of_weight(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m.layer.weight, "first"):
        m.layer.weight.first = h.detach().mean(0)
    return h + m.layer.weight.first


CHANGING: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "counter": (_counter, r"inner.calls \(0 → 1\)"),
    "decay": (_decay, r"inner.rate"),
    "alternating": (_alternating, r"inner.flag \(False → True\)"),
    "growing list": (_growing, r"inner.log"),
    "object": (_object, r"inner.step.number"),
    "list in an object": (_inside_object, r"inner.step.history"),
    "warm-up of 500 steps": (_warm_up, r"inner.calls"),
    "every 1,000 steps": (_every_thousand, r"inner.calls"),
    "global dict": (_global_dict, r"COUNT.calls"),
    "global number": (_global_number, r"TOTAL"),
    "class attribute": (_of_class, r"Inner.shared"),
    "closure": (_closure(), r"calls"),
    "default of an argument": (_default, r"function"),
    "attribute of a function": (_attribute, r"calls"),
    "attribute of a class without functions": (_of_namespace, r"Clock.now \(0 → 1\)"),
    "iterator": (_iterator, r"FACTORS"),
    "generator": (_generated, r"RATES"),
    "array": (_array, r"ROW"),
    "only at first": (_first_only, r"inner.flag"),
    "cache of an activation": (_first_activation, r"inner.cache \(None → tensor\[4\]\)"),
    "cache of a weight": (_first_weight, r"inner.cache"),
    "cache of a buffer that changes": (_first_of_what_changes, r"inner.cache"),
    "cache in a buffer that was None": (_first_kept_as_a_buffer, r"inner._buffers.empty \(None → tensor\[4\]\)"),
    "what the step before left": (_of_the_step_before, r"inner._buffers.empty"),
    "cache by model": (_by_model, r"BY_MODEL"),
    "cache of a thread": (_of_thread, r"LOCAL.first"),
    "cache of a context": (_of_context, r"CONTEXT"),
    "cache in a namespace": (_of_space, r"SPACE.first"),
    "attribute of a parameter": (_of_weight, r"inner.layer.weight.first"),
    "chance": (_by_chance, r"generator of Python or numpy"),
    "numpy": (_noise, r"generator of Python or numpy"),
    "clock": (_by_clock, r"asks time.perf_counter_ns at"),
    "hour, of a clock by another name": (_by_hour, r"asks time.time at"),
    "a date's last digits": (_by_date, r"asks datetime.now at"),
    "the day, of the module": (_by_day, r"asks date.today at"),
    "the day of the year": (_by_local_time, r"asks time.localtime at"),
    "the system's random bytes": (_by_entropy, r"asks os.urandom at"),
    "own generator": (_generator, r"another torch.Generator"),
    "seed": (_seed, r"found manual_seed"),
    "frozen": (_frozen, r"requires_grad changed"),
    "frozen by attribute": (_frozen_by_attribute, r"requires_grad changed"),
}


def _model(function: Callable[[Any, Tensor], Tensor], device: str) -> tuple[nn.Module, Tensor]:
    return Held(function).to(device), torch.ones(3, 4, device=device)


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_is_named_with_the_line_that_it_changes(name: str, device: str) -> None:
    function, found = CHANGING[name]
    model, x = _model(function, device)
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), TOTAL, dict(COUNT)
    with pytest.raises(TraceError, match=rf"(?s)expected forward.*{found}.*test_python_state.py:\d+: \S") as error:
        trace(model, (x,))
    line = str(error.value).rpartition("test_python_state.py:")[2].partition("\n")[0]
    assert "self.function" not in line, line
    assert (model.inner.calls, model.inner.rate, model.inner.flag, model.inner.log) == (0, 1.0, False, [])
    assert (model.inner.step.number, model.inner.step.history, Inner.shared) == (0, [], 0)
    assert states == (
        random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), TOTAL, dict(COUNT)
    )  # fmt: skip


def _cached_length(m: Any, h: Tensor) -> Tensor:
    m.calls = max(m.calls, h.shape[0])
    return h * m.calls


def _cached_table(m: Any, h: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = tuple(range(4))
    return h + torch.tensor(m.cache, device=h.device)


def _logged(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    m.log.append(float(m.calls))
    m.step.history = [m.calls]
    return h.relu()


def _timed(m: Any, h: Tensor) -> Tensor:
    began = time.perf_counter()
    h = h.relu()
    m.log.append(time.perf_counter() - began)
    return h


def _dated(m: Any, h: Tensor) -> Tensor:
    began = datetime(2020, 1, 1)
    m.log.append((datetime.now() - began, isinstance(began, datetime), datetime.fromisoformat("2020-01-01") == began))
    return h.relu() if m.log[-1][1:] == (True, True) and isinstance(DATED, datetime) else h


def _watched_elsewhere(m: Any, h: Tensor) -> Tensor:
    """A progress bar's thread, and what tells how long collecting garbage takes, ask for the time."""
    watch = threading.Thread(target=time.time)
    watch.start()
    gc.collect()
    watch.join()
    return h.relu()


def _tells_time(phase: str, _: dict[str, int]) -> None:
    time.perf_counter()


def _kept(m: Any, h: Tensor) -> Tensor:
    m.cache = h.shape
    random.random()
    return h.relu()


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length)


def _cached_by_function(m: Any, h: Tensor) -> Tensor:
    return h + table(4).to(h.device)


def _rotary(m: Any, h: Tensor) -> Tensor:
    """As rotary positions are kept: of a buffer that does not change, in the dtype of what is at hand."""
    if m.empty is None or m.empty.shape[0] < h.shape[0]:
        m.empty = torch.outer(torch.arange(h.shape[0], device=h.device), m.table).cos().type_as(h)
    return h * m.empty[: h.shape[0]]


def _mask(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.ones_like(h).tril(), persistent=False)
    return h.masked_fill(m.mask == 0, 0.0)


def _of_shapes(m: Any, h: Tensor) -> Tensor:
    m.step.history = m.step.history or [h.new_full((4,), 2.0), torch.zeros_like(h)[0].expand_as(h)]
    m.step.history[0] = m.step.history[0].to(h)
    return h * m.step.history[0] + m.step.history[1]


def _of_the_frozen(m: Any, h: Tensor) -> Tensor:
    m.step.history = m.step.history or [m.frozen.weight * 2]
    return h @ m.step.history[0]


def _shown(m: Any, h: Tensor) -> Tensor:
    """Averages that nothing computes with."""
    last = h.detach().mean()
    m.step.history = [0.9 * m.step.history[0] + 0.1 * last] if m.step.history else [last]
    return h.relu()


def _already_so(m: Any, h: Tensor) -> Tensor:
    m.layer.weight.requires_grad_(True)
    return m.layer(h)


UNCHANGED = [_cached_length, _cached_table, _logged, _timed, _dated, _kept, _already_so, _cached_by_function, _rotary,
             _mask, _of_shapes, _of_the_frozen, _shown]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("function", UNCHANGED)
def test_what_changes_without_effect_is_traced(function: Callable[[Any, Tensor], Tensor], device: str) -> None:
    model, x = _model(function, device)
    assert trace(model, (x,)).loss is not None
    assert model.inner.calls == 0 and model.inner.cache is None and not model.inner.log
    assert not model.inner.step.history and model.inner.empty is None and not hasattr(model.inner, "mask")


def _told(m: Any, h: Tensor) -> Tensor:
    logging.getLogger(__name__).warning("%d rows", h.shape[0])
    return h.relu()


def test_what_packages_date_log_records_with_is_not_forwards() -> None:
    """Ray and others put what makes records in the place of logging's own."""
    before = logging.getLogRecordFactory()

    def dated(*args: Any, **options: Any) -> logging.LogRecord:
        record = before(*args, **options)
        record.created = time.time_ns() / 1e9
        return record

    logging.setLogRecordFactory(dated)
    try:
        model, x = _model(_told, "cpu")
        assert trace(model, (x,)).loss is not None
        with pytest.raises(TraceError, match=r"(?s)asks time.perf_counter_ns at.*test_python_state"):
            trace(_model(lambda m, h: _told(m, _by_clock(m, h)), "cpu")[0], (x,))
    finally:
        logging.setLogRecordFactory(before)


def test_what_other_threads_and_the_collector_ask_is_not_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    again = list[bool]()
    monkeypatch.setattr(python_state, "_check_again", lambda *_: again.append(True))
    gc.callbacks.append(_tells_time)
    try:
        for function in (_watched_elsewhere, _by_local_time):
            model, x = _model(function, "cpu")
            trace(model, (x,))
    finally:
        gc.callbacks.remove(_tells_time)
    assert again == [True], "of what forward asks itself alone"


def test_what_is_kept_unseen_shows_in_the_next_step_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step that is compared, parameters are others."""
    monkeypatch.setattr(python_state, "_check_again", lambda *_: None)
    model, x = _model(_first_activation, "cpu")
    graph = trace(model, (x,))
    with pytest.raises(TraceError, match=r"another loss in step 2"):
        held_against_eager(model, graph, (x,))
    kept = [value.clone() for value in model.state_dict().values()]
    assert held_against_eager(*((m := _model(_logged, "cpu")[0]), trace(m, (x,))), (x,)) == "yes"
    assert all(map(torch.equal, kept, model.state_dict().values())), "parameters are what they were"


def test_what_inference_keeps_of_parameters_is_traced() -> None:
    """They do not change there; in training they do."""
    model, x = _model(_first_weight, "cpu")
    assert trace(model.eval(), (x,), mode="inference").outputs


def test_a_loss_that_counts_is_refused_too() -> None:
    step = Step()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        step.number += 1
        return (output - target).pow(2).mean() * step.number

    with pytest.raises(TraceError, match="number"):
        trace(nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 2)), loss_fn=loss)
    assert step.number == 0


def test_a_forward_that_was_replaced_is_what_is_traced() -> None:
    model = Held(lambda m, h: h.relu())
    model.inner.forward = lambda x: model.inner.layer(x).sigmoid()  # type: ignore[method-assign]
    assert "aten.sigmoid.default" in [node.op for node in trace(model, (torch.ones(3, 4),)).nodes]


class Capturing(nn.Module):
    """Its forward hooks its blocks once, and adds up what the hooks collect; the last block does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Held(lambda m, h: h.relu()).inner for _ in range(5))
        self.blocks[4].function = lambda m, h: h.tanh()
        self.collected = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_hooked", False):
            self.is_hooked = True
            for block in self.blocks:
                block.layer.register_forward_hook(lambda module, args, output: self.collected.append(output))
        for block in self.blocks:
            x = block(x)
        total = sum(item.mean() for item in self.collected)
        self.collected.clear()
        return x.mean() + total


def test_hooks_that_forward_installs_once_are_there_once_in_every_attempt() -> None:
    model, x = Capturing(), torch.ones(3, 4)
    graphs = [trace(model, (x,), fewest=fewest) for fewest in (2, 1_000)]
    assert [node.op for node in graphs[0].nodes] == [node.op for node in graphs[1].nodes]
    assert not any(block.layer._forward_hooks for block in model.blocks) and "is_hooked" not in vars(model)


def test_what_a_model_keeps_may_be_a_pair_of_a_name_and_a_list() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), [("scales", [2.0, 3.0]), ("bias", 1)]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).pow(2).mean() * self.kept[0][1][0]

    assert trace(Model(), (torch.randn(2, 4),)).loss is not None


def test_caches_of_functions_hold_nothing_of_tracing() -> None:
    """What they made while tracing would be a tensor without values ever after."""
    table.cache_clear()
    trace(*_traced_with_cache())
    assert table.cache_info().currsize == 0 and table(4).tolist() == [0, 1, 2, 3]


def _traced_with_cache() -> tuple[nn.Module, tuple[Tensor]]:
    model, x = _model(_cached_by_function, "cpu")
    return model, (x,)
