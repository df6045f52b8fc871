"""Turns a model and example inputs into the forward `Graph`: export, convert, clean, find repeated blocks."""

from autopar.trace.blocks import Blocks, find_blocks
from autopar.trace.guard import held_against_eager
from autopar.trace.losses import with_loss
from autopar.trace.trace import trace

__all__ = ["Blocks", "find_blocks", "held_against_eager", "trace", "with_loss"]
