"""Freed memory stays with the process, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
import torch
from autopar import runtime

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    tensors = [torch.ones(1 << 21) for _ in range(32)]  # 8 MiB each

def faults_of_a_second_step():
    step()
    before = faults()
    step()
    return faults() - before

as_it_is = faults_of_a_second_step()
assert runtime.keep_freed_memory()
print(as_it_is, faults_of_a_second_step())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_a_step_finds_the_memory_that_the_one_before_freed() -> None:
    """Page faults of a step that takes as much as the one before freed, without and with the setting."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    without, kept = map(int, done.stdout.split())
    assert 4 * kept < without
