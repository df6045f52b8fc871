"""Views are found by name: each that a plan or timeline asks for is there, and a name that is not says so."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.ir import plan
from autopar.simulate import timeline
from autopar.views import view


@pytest.mark.parametrize("module", [plan, timeline])
def test_each_view_that_is_asked_for_is_a_function(module: object) -> None:
    names = re.findall(r"\bview\(\"(\w+)\"\)", inspect.getsource(module))  # type: ignore[arg-type]
    assert names
    assert all(inspect.isfunction(view(name)) for name in names)


def test_a_view_that_nobody_has_named_says_which_there_are() -> None:
    with pytest.raises(LookupError, match=r"expected a view named 'opera', found \[.*'card'.*\]; autopar/__init__.py"):
        view("opera")


def test_a_plan_is_shown_where_nothing_but_the_plan_is_imported(tmp_path: Path) -> None:
    """As in a process that unpickles one."""
    source = (
        "import sys; from autopar.ir.plan import Plan, Stage; from autopar.ir.mesh import Mesh\n"
        "assert not any(name.startswith('autopar.show') for name in sys.modules)\n"
        "plan = Plan('', 'Model', Mesh('cpu', 1, 2), (Stage(0, ()),), memory_limit=1)\n"
        "assert 'Model on' in str(plan) and Plan.from_json(plan.to_json()) == plan"
    )
    root = Path(autopar.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", source], cwd=root, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
