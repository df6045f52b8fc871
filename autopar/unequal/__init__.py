"""Plans by hand for unequal devices: no stage mixes kinds, each is planned for its own, blocks are shared out by speed.

    for each kind: placements of the whole model on a stage's axes    `planning.Place`
    blocks of each stage                                              `sizes_by_speed`, as long as each fits
    one plan of all stages                                            `staging.cut`, simulated with all profiles

Stages are in the order of their devices' memory, the largest first, since the first holds most microbatches in flight.
Links between kinds are those of the slower of both (`cost.crossing`): data sheets say what an adapter reaches, and both
are on the way.
"""

from autopar.unequal.search import searched_kinds, unequal_in
from autopar.unequal.stages import UnequalStages, sizes_by_speed

__all__ = ["UnequalStages", "searched_kinds", "sizes_by_speed", "unequal_in"]
