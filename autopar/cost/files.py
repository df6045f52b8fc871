"""Where the shipped profiles lie: cost_profiles/ of a checkout, or the installed autopar.cost_profiles."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

SCHEMA = "profile.schema.json"


def profiles_folder() -> Traversable:
    """The folder that holds the shipped profiles and their schema."""
    checkout = Path(__file__).parents[2] / "cost_profiles"
    return checkout if (checkout / SCHEMA).exists() else resources.files("autopar.cost_profiles")
