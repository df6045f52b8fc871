"""Small models as papers and libraries write them, each of another kind of training."""

from __future__ import annotations

from tests.constructs.practice import contrastive, data, images, methods, parameters, scans, sequences
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
FILES = (contrastive, images, sequences, parameters, scans, methods, data)
CASES = tuple(Written(f"practice: {name}", HEAD + text) for file in FILES for name, text in file.PROGRAMS.items())
"""Each takes a batch of B samples and returns the loss, alone or among other things."""
