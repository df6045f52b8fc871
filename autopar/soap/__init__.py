"""Refines a plan by Markov chain Monte Carlo over SOAP dims, each proposal simulated (FlexFlow)."""

from autopar.soap.annealing import Jump, Score, Watch, World
from autopar.soap.ledger import NEVER, Ledger, Stages
from autopar.soap.proposals import INPUT, STORAGE, Proposals
from autopar.soap.refining import Budget, RefinedPlan, Start, refine, refined_elsewhere
from autopar.soap.space import Space

__all__ = [
    "INPUT",
    "NEVER",
    "STORAGE",
    "Budget",
    "Jump",
    "Ledger",
    "Proposals",
    "RefinedPlan",
    "Score",
    "Space",
    "Stages",
    "Start",
    "Watch",
    "World",
    "refine",
    "refined_elsewhere",
]
