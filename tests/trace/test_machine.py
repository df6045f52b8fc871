"""Where forward may find the machine's clocks: modules that were looked at before, and have them since."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest

from autopar.trace import machine
from autopar.trace.machine import MachineAnswers

OWN = {"time": time.time, "monotonic": time.monotonic}  # names of modules, of this one too, have others inside


@pytest.mark.parametrize("file", ["/venv/site-packages/installed.py", "/home/user/model.py"])
def test_a_module_that_takes_a_clock_later_is_looked_at_again(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that has come in the place of another."""
    module = ModuleType("takes_a_clock")
    module.__dict__.update(__file__=file, other=time.sleep)
    monkeypatch.setitem(sys.modules, "takes_a_clock", module)
    with MachineAnswers().noted():
        assert module.__dict__["other"] is time.sleep
    module.__dict__["clock"] = time.time
    for _ in range(2):
        with MachineAnswers().noted():
            assert module.__dict__["clock"] is not OWN["time"]
        assert module.__dict__["clock"] is OWN["time"]
    another = ModuleType("takes_a_clock")
    another.__dict__.update(module.__dict__, clock=len, other=time.monotonic)
    monkeypatch.setitem(sys.modules, "takes_a_clock", another)
    with MachineAnswers().noted():
        assert another.__dict__["other"] is not OWN["monotonic"] and another.__dict__["clock"] is len


def test_a_name_of_the_users_module_that_becomes_a_clock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("users")
    module.__dict__.update(__file__="/home/user/model.py", clock=None)
    monkeypatch.setitem(sys.modules, "users", module)
    with MachineAnswers().noted():
        pass
    module.__dict__["clock"] = time.time
    with MachineAnswers().noted():
        assert module.__dict__["clock"] is not OWN["time"]


def test_clocks_that_others_have_replaced_are_looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of them: another may have the id of one that is gone."""
    remembered = {*machine._LOOKED_AT}
    module = ModuleType("holds_a_replaced_clock")
    module.__dict__["__file__"] = "/venv/site-packages/installed.py"
    monkeypatch.setitem(sys.modules, "holds_a_replaced_clock", module)
    for answer in (1.0, 2.0):
        frozen: Callable[[], float] = partial(float, answer)
        monkeypatch.setattr(time, "time", frozen)
        module.__dict__["clock"] = frozen
        with MachineAnswers().noted():
            assert module.__dict__["clock"] is not frozen and module.__dict__["clock"]() == answer
        assert module.__dict__["clock"] is frozen
    assert {*machine._LOOKED_AT} == remembered
