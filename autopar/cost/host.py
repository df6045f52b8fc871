"""The `cpu` profile: measured on this host at first use, then read from the user's cache directory.

The cache is keyed by CPU model, number of cores, torch version and revision of the measurements. Processes
that ask at the same time wait for one of them to measure; the file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopar.cost.fit import profile_from_points
from autopar.cost.measure import median_of
from autopar.cost.profile import FORMAT, Profile, profile_from_json, read_profile
from autopar.errors import ProfileError

REVISION = 12  # of the measurements: a new one measures every host anew
TIMEOUT_SECONDS = 600  # each script takes less than two minutes on an idle machine
MEASURE = (Path(__file__).with_name("measure.py"), Path(__file__).with_name("measure_gloo.py"))


def host_profile() -> Profile:
    """This host's profile. Raises ProfileError when it cannot be measured."""
    path = cache_path()
    with _alone(path):
        if path.exists():
            try:
                return read_profile(path)
            except ProfileError as error:
                print(f"autopar: {error}; measuring this host anew", file=sys.stderr)
        data = measure_host()
        profile = profile_from_json(data, str(path))
        try:
            _write_whole(path, data)
        except OSError as error:
            print(f"autopar: this host's profile is kept for this process alone: {error}", file=sys.stderr)
        return profile


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock of a file, where one can be taken: of what can only be read, nobody writes another."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure_profile(
    path: Path | None = None, points: Path | None = None, windows: int = 1, pause_s: float = 0.0
) -> tuple[Profile, Path]:
    """Measures this host anew and writes its profile to `path`, or to where `cpu` is kept.

    With `points`, each operator's time is kept in that file (those of later windows beside it), and a run that was
    stopped goes on from there. windows, pause_s: as in `measure_host`. Returns the profile and where it lies. Raises
    ProfileError when the host cannot be measured, or the file is another host's.
    """
    path = path or cache_path()
    data = measure_host(points, windows, pause_s)
    profile = profile_from_json(data, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, data)
    return profile, path


def cache_path() -> Path:
    """Where this host's profile is kept."""
    key = f"{cpu_model()}|{num_cores()}|{version('torch')}|{FORMAT}.{REVISION}"
    return cache_folder() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def cache_folder() -> Path:
    """Where this user's autopar keeps what took long to find out."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def measure_host(points: Path | None = None, windows: int = 1, pause_s: float = 0.0) -> dict[str, Any]:
    """Measures in processes of their own, with one thread each, two to three minutes a window; goes on from `points`.

    windows: how often everything is measured, `pause_s` seconds apart; each number is its median over them. A host that
    is fast or slow for minutes then does not make all of the profile so.
    """
    found = []
    for number in range(windows):
        time.sleep(pause_s if number else 0.0)
        kept = ["--points", str(_window_file(points, number).absolute())] if points else []
        found.append(_points(MEASURE[0], *kept) | _points(MEASURE[1]))
    facts = {"model": cpu_model(), "cores": num_cores(), "memory": memory_bytes()}
    return profile_from_points(median_of(found), facts, date.today().isoformat())


def _window_file(points: Path, number: int) -> Path:
    return points.with_name(f"{points.name}.{number}") if number else points


def _points(script: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=_progress(),
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise ProfileError(
            f"expected to measure this host, found exit code {done.returncode} from {' '.join(command)}: "
            f"{(done.stderr or '')[-500:]}; run that command to see why, or name a profile's JSON file"
        )
    points: dict[str, Any] = json.loads(done.stdout)
    return points


def _progress() -> int | None:
    """Progress goes to the terminal when there is one; else what is written there is kept for the error."""
    return None if sys.stderr.isatty() else subprocess.PIPE


def _write_whole(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(data, file, indent=1)
    os.replace(file.name, path)


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the host, or of the container's limit when that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return physical if text == "max" else min(physical, int(text))
