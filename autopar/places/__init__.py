"""Plans of one stage over all logical meshes, in ever more microbatches until something fits (Alpa §4)."""

from autopar.places.copied import CopiedPlace, copied_ladders
from autopar.places.in_bits import CompactPlace, compact_ladder, compact_ladders
from autopar.places.search import PlaceSearch

__all__ = ["CompactPlace", "CopiedPlace", "PlaceSearch", "compact_ladder", "compact_ladders", "copied_ladders"]
