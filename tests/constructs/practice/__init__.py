"""Small models as papers and libraries write them, each of another kind of training."""

from __future__ import annotations

from tests.constructs.practice import contrastive, images, parameters, sequences
from tests.constructs.written import Written

HEAD = """\
import math

import torch
import torch.nn.functional as F
from torch import nn

B = 8


def loss_fn():
    return None

"""
CASES = tuple(
    Written(f"practice: {name}", HEAD + text)
    for programs in (contrastive.PROGRAMS, images.PROGRAMS, sequences.PROGRAMS, parameters.PROGRAMS)
    for name, text in programs.items()
)
"""Each takes a batch of B samples and returns the loss, alone or among other things."""
