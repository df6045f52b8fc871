"""Graph → equal Graphs: rules that are proved, and searched for what is faster (TASO, OSDI'22 Unity).

lift (ATen operators as terms of an algebra) → match and rewrite (rules of `rules.json`; each distinct block once, in
parts where it is large, by cost-based backtracking) → lower (ATen operators again) → packed
(what only moves parameters is how they are stored)
"""

from autopar.substitute.joint import GraphCandidate, Substituted, substituted
from autopar.substitute.packing import packed
from autopar.substitute.replay import replayed
from autopar.substitute.rules.rulefile import load_rules

__all__ = ["GraphCandidate", "Substituted", "load_rules", "packed", "replayed", "substituted"]
