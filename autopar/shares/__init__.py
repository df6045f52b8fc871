"""Plans for unequal devices that work on one batch together: placements for all of them, then shares by speed.

    placements on axes (data, model)    `planning.Place`, for as many of the slowest device; samples are cut over data
    rows of each kind of rank           `best_rows`: simulated step time, within each device's memory
    axes with shares                    `ir.shares`; simulated with all profiles (`simulate.together`)

Ranks of one kind get equally many rows of each microbatch. Some kind gets as many as an equal share, or more: so no
step is shorter than what the fastest kind takes to compute that much.
"""

from autopar.shares.batch import SharedBatch, best_rows, near_rows
from autopar.shares.search import searched_shares, shared_axes, shared_in

__all__ = ["SharedBatch", "best_rows", "near_rows", "searched_shares", "shared_axes", "shared_in"]
