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

{call}
step()
before = faults()
step()
print(faults() - before)
"""


def page_faults(call: str) -> int:
    """Of a second step that takes as much as the first one freed."""
    done = subprocess.run([sys.executable, "-c", STEPS.format(call=call)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_a_step_finds_the_memory_that_the_one_before_freed() -> None:
    assert 4 * page_faults("assert runtime.keep_freed_memory()") < page_faults("")
