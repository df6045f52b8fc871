"""Which operators' rules are proved: the record of the property test over torch's own samples.

A rule that somebody else states (DTensor's registry, or torch's tag for pointwise operators) is trusted only for
operators that the test has sharded, run and joined without a difference. `python -m tests.ops.sweep` makes the
record anew.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

PATH = Path(__file__).with_name("proofs.json")
_RECORD = json.loads(PATH.read_text())

#: overloads for which every rule held, in every layout that was tried
PROVED: Container[str] = frozenset(_RECORD["proved"])

#: overloads that hold where every rank has elements; torch's own kernels fail on tensors without
NEED_ELEMENTS: Container[str] = frozenset(_RECORD["need_elements"])

#: overload -> the first case that did not hold
FAILED: dict[str, str] = _RECORD["failed"]


def objection(op: str) -> str:
    """Why rules of others for the operator are not trusted; empty when they are."""
    if op in FAILED:
        return f"its rules fail the property test: {FAILED[op]}"
    return "" if op in PROVED else "no sample proves its rules"
