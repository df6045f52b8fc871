"""All kinds, by the files that group them."""

from tests.random_programs.kinds import (
    algebra,
    elementwise,
    layers,
    losses,
    methods,
    reductions,
    spatial,
    views,
)

GROUPS = {
    "views": views.ROWS,
    "reductions": reductions.ROWS,
    "algebra": algebra.ROWS,
    "spatial": spatial.ROWS,
    "layers": layers.ROWS,
    "elementwise": elementwise.ROWS,
    "methods": methods.ROWS,
    "losses": losses.ROWS,
}
KINDS = {row.name: row for rows in GROUPS.values() for row in rows}
