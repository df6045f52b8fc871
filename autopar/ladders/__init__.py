"""`autopar ladder`: plans of one model for many meshes and batches, what to rent of them, and curves for schedulers.

meshes × global batches      → rungs: a plan each, of what all share                       `making`, `climbing`
rungs                        → curves, knees, the front of time and money                  `rungs`
tokens, a deadline, a budget → the cheapest or the fastest rungs, proved                   `capacity`
rungs                        → forms that schedulers read, hints, pauses                   `forms`, `exports`
"""

from __future__ import annotations

from autopar.ladders.capacity import Capacity, Needs, capacity
from autopar.ladders.exports import StateStore, exported
from autopar.ladders.forms import FittedForm, fitted, goodput, points_of
from autopar.ladders.making import ladder
from autopar.ladders.programme import Programme, provisioned
from autopar.ladders.rungs import Ladder, Rung

__all__ = [
    "Capacity", "FittedForm", "Ladder", "Needs", "Programme", "Rung", "StateStore", "capacity", "exported", "fitted",
    "goodput", "ladder", "points_of", "provisioned",
]  # fmt: skip
