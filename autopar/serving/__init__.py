"""Serving: a decoder with a cache of keys and values, its prefill and decode steps planned and emitted for several ranks."""

from autopar.serving.curve import BatchLatency as BatchLatency
from autopar.serving.curve import LatencyCurve as LatencyCurve
from autopar.serving.curve import StepLatency as StepLatency
from autopar.serving.program import ServedProgram as ServedProgram
from autopar.serving.serve import serve as serve
