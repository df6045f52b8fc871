"""Random numbers that ranks draw alike or apart, as a placement asks, without touching torch's own generators."""

from __future__ import annotations
