"""Freezes today's figures and sources: `python -m tests.oracles.frozen.make [--only TEXT]` writes frozen.json.

--only: of cases with the text in their name, the others are kept. Who refreshes the file says in the commit which old
figures were wrong, and why. `cpu` is the shipped profile, whatever was measured on this host.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.conftest import _take_the_shipped_profile_of_cpus
from tests.oracles.frozen.cases import CASES
from tests.oracles.frozen.figures import Figures, figures

FROZEN = Path(__file__).with_name("frozen.json")


def frozen() -> dict[str, Figures]:
    """Figures by the name of their case."""
    found: dict[str, Figures] = json.loads(FROZEN.read_text())
    return found


def text(found: dict[str, Figures]) -> str:
    """As JSON with a line for each figure of a case, and for each of its lanes."""
    cases = [f"{json.dumps(name)}: {{\n{_case(made)}\n}}" for name, made in found.items()]
    return "{\n" + ",\n".join(cases) + "\n}\n"


def _case(made: Figures) -> str:
    return ",\n".join(f"  {json.dumps(key)}: {_value(value)}" for key, value in made.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
    return json.dumps(value)


def main() -> None:
    """Writes the file, and prints which cases differ from before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    _take_the_shipped_profile_of_cpus()
    before = frozen() if FROZEN.exists() else {}
    found = {case.name: figures(case) if options.only in case.name else before[case.name] for case in CASES}
    for name, made in found.items():
        if before.get(name) != made:
            print(f"{'changed' if name in before else 'new'}: {name}")
    FROZEN.write_text(text(found))


if __name__ == "__main__":
    main()
