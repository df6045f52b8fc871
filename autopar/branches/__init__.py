"""Operators that know nothing of each other run at the same time on disjoint parts of an axis, where that is faster."""

from autopar.branches.finding import ForkRegion, find_regions
from autopar.branches.placing import put_in_branches
from autopar.branches.search import most_spared_ns, with_branches
from autopar.branches.times import Times

__all__ = ["ForkRegion", "Times", "find_regions", "most_spared_ns", "put_in_branches", "with_branches"]
