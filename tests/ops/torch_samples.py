"""Torch's own sample inputs as operator calls: each sample is run, and every ATen call it comes down to is kept.

Samples run below autograd, where composite operators arrive whole. Each call is kept and then taken apart by the
decompositions that the tracer uses, so that both `linear` and the `addmm` inside it are found, with the arguments
that the tracer would hand on.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.export import default_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.ops.samples import Sample

MAX_SAMPLES = 16  # of one operator and dtype, spread over all that torch has
MAX_CALLS = 16  # of one overload, spread over all that were seen
MAX_ELEMENTS = 5_000
_DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)


def torch_samples(wanted: Callable[[str], bool], num_infos: int | None = None) -> dict[str, list[Sample]]:
    """For each overload that is wanted, up to MAX_CALLS different calls of it, in a fixed order.

    num_infos: of how many entries of torch's list the samples are run, a fixed random choice; all by default.
    """
    recorder, infos = _Recorder(wanted), _op_database()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in infos if num_infos is None else random.Random(0).sample(infos, num_infos):
            for dtype in _dtypes(info):
                _run_samples(info, dtype, recorder)
    return {op: _spread(list(calls.values()), MAX_CALLS) for op, calls in sorted(recorder.calls.items())}


class _Recorder(TorchDispatchMode):
    """Keeps one call for each operator, argument values and operand shapes; takes every operator apart."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls: dict[str, dict[str, Sample]] = {}
        self.decompositions = default_decompositions()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wanted(str(func)):
            self._keep(func, args, kwargs)
        with self:
            if not func._schema.is_mutable and func in self.decompositions:
                made = self.decompositions[func](*args, **kwargs)
                if made is not NotImplemented:
                    return made
            if func._can_decompose():
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        sample = Sample(str(func), *tree_map(_own, (args, kwargs)), exact=False)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if not tensors or any(t.numel() > MAX_ELEMENTS or t.layout != torch.strided for t in tensors):
            return
        dtypes = [t.dtype for t in tensors]
        self.calls.setdefault(sample.op, {}).setdefault(f"{sample}{dtypes}", sample)


def _own(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _run_samples(info: Any, dtype: torch.dtype, recorder: _Recorder) -> None:
    torch.manual_seed(0)
    random.seed(0)
    try:
        samples = _spread(list(info.sample_inputs("cpu", dtype, requires_grad=False)), MAX_SAMPLES)
    except Exception:  # torch's generators refuse some dtypes that they list
        return
    for sample in samples:
        try:
            with torch._C._AutoDispatchBelowAutograd(), recorder:
                info.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # such as an operator that only runs with autograd, or only on another device
            continue


def _dtypes(info: Any) -> list[torch.dtype]:
    """float64 where it is supported, and complex; else the first that is."""
    known = [dtype for dtype in _DTYPES if dtype in info.dtypes]
    return known[:2] if known[:2] == [torch.float64, torch.complex128] else known[:1]


def _spread(values: list[Any], count: int) -> list[Any]:
    """At most `count` of the values, at equal distances."""
    step = max(1.0, len(values) / count)
    return [values[int(index * step)] for index in range(min(count, len(values)))]


def _op_database() -> list[Any]:
    """Torch's list of operators with sample inputs: private, and made for torch's own tests.

    Its module changes flags, filters and the environment of whoever imports it; they are put back.
    """
    flag = torch.backends.__allow_nonbracketed_mutation_flag
    _stand_in()
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        from torch.testing._internal.common_methods_invocations import op_db
    torch.backends.__allow_nonbracketed_mutation_flag = flag
    return list(op_db)


def _stand_in() -> None:
    """For expecttest where it is missing: torch only derives a test class from it, which is not used here."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module
