"""Serving: a decoder with a cache of keys and values, whose prefill and decode steps are planned and emitted."""

from autopar.serving.curve import BatchLatency as BatchLatency
from autopar.serving.curve import LatencyCurve as LatencyCurve
from autopar.serving.curve import StepLatency as StepLatency
from autopar.serving.making import serve as serve
from autopar.serving.program import ServedProgram as ServedProgram
