"""Torch optimizers, and those of others, on parameters of which a rank has a part: right, or refused with the remedy.

Those that compute each element by itself step on shards. Others get whole plain tensors: `kinds` says which is which,
`session` puts them in place of the parameters, `memory` gathers them when they are looked at, `keeping` cuts what is
kept between steps.
"""

from autopar.runtime.optimizers.kinds import declare_optimizer
from autopar.runtime.optimizers.stepping import guard_optimizers, register

__all__ = ["declare_optimizer", "guard_optimizers", "register"]
