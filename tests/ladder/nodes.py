"""Nodes of one rank each, on this host: a torchrun for each, which may be killed with its rank and what it keeps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.rank_pool import _free_port

ROOT = Path(__file__).parents[2]

# Runs train.py; each step takes a while, so that a rank is killed in the midst of one, until nothing more is to come.
_DRIVER = """
import os, sys, time
from pathlib import Path
import torch
sys.path.insert(0, os.environ["FOLDER"])
import train
step = train.rt.Rank.train_step
def slow(*args, **named):
    time.sleep(0 if (Path(__file__).parent / "fast").exists() else float(os.environ["STEP_S"]))
    return step(*args, **named)
train.rt.Rank.train_step = slow
torch.set_num_threads(1)
train.main(train.arguments(sys.argv[1:]))
"""


class Nodes:
    """folder: what `save_elastic` wrote. work: for checkpoints, the log, and what each node keeps."""

    def __init__(self, folder: Path, work: Path, steps: int, least: int, most: int, step_s: float = 0.15) -> None:
        self._folder, self.work, self._count, self._step_s = folder, work, (least, most), step_s
        self.log = work / "log.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        (work / "driver.py").write_text(_DRIVER)
        data = json.loads((folder / "elastic.json").read_text())["rendezvous"]
        conf = {"keep_alive_interval": data["keep_alive_s"], "keep_alive_max_attempt": data["keep_alive_attempts"],
                "last_call_timeout": data["last_call_s"], "is_host": 0}  # fmt: skip
        self._conf = ",".join(f"{name}={value}" for name, value in conf.items())
        self._port = _free_port()
        self._store = TCPStore("127.0.0.1", self._port, None, True, timedelta(seconds=60), wait_for_workers=False)
        self._arguments = ["--steps", str(steps), "--save-every", "1000", "--elastic", str(folder),
                           "--log-file", str(self.log), "--checkpoints", str(work / "checkpoints")]  # fmt: skip
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *numbers: int) -> None:
        """Starts nodes, or starts them again."""
        least, most = self._count
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FOLDER": str(self._folder),
                     "STEP_S": str(self._step_s), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
        for number in numbers:
            command = [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={least}:{most}", "--nproc-per-node=1",
                "--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
                "--rdzv-id=test", f"--rdzv-conf={self._conf}", "--local-addr=127.0.0.1",
                str(self.work / "driver.py"), *self._arguments, "--snapshots", str(self._kept(number)),
            ]  # fmt: skip
            with (self.work / f"node_{number}.txt").open("ab") as output:
                process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
            self._running[number] = process

    def _kept(self, number: int) -> Path:
        return self.work / f"kept_{number}"

    def kill(self, *numbers: int) -> None:
        """Kills nodes at once, with their ranks, and takes away what they keep."""
        every = [pid for number in numbers for pid in _family(self._running[number].pid)]
        for pid in every:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for number in numbers:
            self._running.pop(number).wait()
            shutil.rmtree(self._kept(number), ignore_errors=True)

    def logged(self) -> list[dict[str, Any]]:
        """The lines of the log so far."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def wait(self, until: Callable[[list[dict[str, Any]]], bool], seconds: float = 150.0) -> None:
        """Until the log says so."""
        end = time.monotonic() + seconds
        while not until(self.logged()):
            alive = [process.poll() is None for process in self._running.values()]
            assert any(alive) and time.monotonic() < end, self.text()
            time.sleep(0.05)

    def trains_on(self, ranks: int, steps: int = 2) -> None:
        """Waits until so many ranks have done so many steps since they were started."""

        def does(log: list[dict[str, Any]]) -> bool:
            start = max((place for place, line in enumerate(log) if "ranks" in line), default=-1)
            done = [line for line in log[start + 1 :] if len(line.get("own_s", ())) == ranks]
            return len(done) >= steps

        self.wait(does)

    def hurry(self) -> None:
        """From now on, steps take no while."""
        (self.work / "fast").touch()

    def join(self, seconds: float = 150.0) -> list[int]:
        """The exit codes of all nodes that run, once they have ended."""
        return [process.wait(seconds) for process in self._running.values()]

    def text(self) -> str:
        """What nodes have printed."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.work.glob("node_*.txt")))

    def stop(self) -> None:
        """Ends what still runs."""
        self.kill(*self._running)


def _family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [own for child in task.read_text().split() for own in _family(int(child))]
    return found
