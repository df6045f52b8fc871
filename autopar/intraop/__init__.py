"""Chooses a placement for every tensor on one submesh (Alpa's intra-operator pass)."""

from autopar.intraop.builder import SOFT_PENALTY_NS, KeptParameter, Options, open_options
from autopar.intraop.costs import ProfiledCosts, Sends
from autopar.intraop.search import LeastMemory, Placements, costs_of, kept_in, prepare_placements
from autopar.intraop.tradeoffs import TradeOff, TradeOffs

__all__ = [
    "SOFT_PENALTY_NS", "KeptParameter", "LeastMemory", "Options", "Placements", "ProfiledCosts", "Sends", "TradeOff",
    "TradeOffs", "costs_of", "kept_in", "open_options", "prepare_placements",
]  # fmt: skip
