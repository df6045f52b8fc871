"""The end of a rank: what gloo's threads still hold when the last step is done must not abort the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_RANK = """
import os, sys, time
import torch.distributed as dist
from autopar.runtime.ending import await_gloo_at_exit

class Slow:  # what Python has to clear away at its end, with other threads running meanwhile
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

rank, store, is_awaited = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "awaited"
if is_awaited:
    await_gloo_at_exit()
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
for thread in os.listdir("/proc/self/task"):  # gloo's threads come last: the caller goes on as soon as it can
    os.sched_setaffinity(int(thread), {core})
    with open(f"/proc/self/task/{thread}/comm") as name:
        if name.read().startswith("pt_gloo"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
for _ in range(3):
    dist.all_gather_object([None, None], "a rank")
    dist.barrier()
slow = Slow()
print("done", flush=True)
"""


def _codes(folder: Path, how: str) -> list[int]:
    store = (folder / f"store-{how}").as_uri()
    command = [sys.executable, "-c", _RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), store, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert printed == "done\n"
    return [rank.returncode for rank in ranks]


@pytest.mark.ranks
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux, to let gloo's threads come last")
def test_ranks_end_well_though_gloo_s_threads_come_late(tmp_path: Path) -> None:
    assert _codes(tmp_path, "awaited") == [0, 0]
