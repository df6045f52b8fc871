"""Chooses a placement for every tensor on one submesh (Alpa's intra-operator pass)."""

from autopar.intraop.builder import Kept
from autopar.intraop.costs import Sends
from autopar.intraop.search import LeastMemory, Placements, kept_in, prepare_placements
from autopar.intraop.tradeoffs import TradeOff, TradeOffs

__all__ = ["Kept", "LeastMemory", "Placements", "Sends", "TradeOff", "TradeOffs", "kept_in", "prepare_placements"]
