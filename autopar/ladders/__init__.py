"""`autopar ladder`: plans of one model for many meshes and batches, what to rent of them, and curves for schedulers.

meshes × global batches      → rungs: a plan each, of what all share                       `making`, `climbing`
rungs                        → curves, knees, the front of time and money                  `rungs`
tokens, a deadline, a budget → the cheapest or the fastest rungs, proved                   `capacity`
rungs                        → forms that schedulers read, hints, pauses                   `forms`, `exports`
two rungs                    → bytes and seconds from one's state to the other's           `layouts`, `transitions`
rungs of one batch           → programs for nodes that go and come                         `elastic`
"""

from __future__ import annotations

from autopar.ladders.capacity import Capacity, Needs, capacity
from autopar.ladders.elastic import Rendezvous, save_elastic
from autopar.ladders.exports import exported
from autopar.ladders.forms import FittedForm, fitted, goodput, points_of
from autopar.ladders.making import ladder
from autopar.ladders.programme import Programme, provisioned
from autopar.ladders.rungs import Ladder, Rung
from autopar.ladders.stores import StateStore
from autopar.ladders.transitions import Transition, transition

__all__ = [
    "Capacity", "FittedForm", "Ladder", "Needs", "Programme", "Rendezvous", "Rung", "StateStore", "Transition",
    "capacity", "exported", "fitted", "goodput", "ladder", "points_of", "provisioned", "save_elastic", "transition",
]  # fmt: skip
