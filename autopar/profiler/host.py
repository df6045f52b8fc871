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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopar.clock import Interrupted, is_interrupted
from autopar.cost.profile import FORMAT, Profile, profile_from_json, read_profile
from autopar.errors import ProfileError
from autopar.profiler.fit import profile_from_points
from autopar.profiler.measure import median_of

REVISION = 12  # of the measurements: a new one measures every host anew
LINE_SECONDS = 20  # from one line to the next that says how long it takes, where no terminal shows a bar
BUSY = (
    0.25  # of the host's processors taken by other programs: what is measured then is measured once more, and says so
)
TIMEOUT_SECONDS = 600  # each script takes less than two minutes on an idle machine
MEASURE_GPU = Path(__file__).with_name("measure_gpu.py")
MEASURE = (Path(__file__).with_name("measure.py"), Path(__file__).with_name("measure_gloo.py"))


def host_profile() -> Profile:
    """This host's profile. Raises ProfileError when it cannot be measured."""
    path = cache_path()
    with _alone(path):
        if os.path.exists(path):  # Path.exists raises where a folder may not be looked into
            try:
                return read_profile(path)
            except ProfileError as error:
                print(f"autopar: {error}; measuring this host anew", file=sys.stderr)
        data = json.loads(json.dumps(measure_host()))  # as it is read again
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
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"
    except RuntimeError:  # a user without a home, as some containers have
        return Path(tempfile.gettempdir()) / f"autopar-{os.getuid()}"


def measure_host(points: Path | None = None, windows: int = 1, pause_s: float = 0.0) -> dict[str, Any]:
    """Measures in processes of their own, with one thread each, two to three minutes a window; goes on from `points`.

    windows: how often everything is measured, `pause_s` seconds apart; each number is its median over them. A host that
    is fast or slow for minutes then does not make all of the profile so.
    """
    often = "" if windows == 1 else f"{windows} times, "
    _say(f"measuring this host, {often}for two to three minutes; the result is kept")
    found: list[dict[str, Any]] = []
    busiest = busy = others_share()
    while len(found) < windows + (busiest > BUSY):
        number = len(found)
        time.sleep(pause_s if number else 0.0)
        kept = ["--points", str(_window_file(points, number).absolute())] if points else []
        found.append(_points(MEASURE[0], *kept) | _points(MEASURE[1]))
        busy = others_share()
        if number < windows and busiest <= BUSY < busy:
            _say(f"other programs take {busy:.0%} of this host: measured once more")
        busiest = max(busiest, busy)
    facts = {"model": cpu_model(), "cores": num_cores(), "memory": memory_bytes()}
    data = profile_from_points(median_of(found), facts, date.today().isoformat())
    if busiest > BUSY:
        _say(
            f"other programs took up to {busiest:.0%} of this host; `autopar profile` measures it anew when it is idle"
        )
        _add_to_sources(data, f", on a busy host ({busiest:.0%} taken by other programs)")
    return data


def others_share(seconds: float = 1.0) -> float:
    """The share of this host's processor time that others take while this process sleeps, stolen time with it; 0 where
    the system does not say."""
    try:
        before = _ticks()
        time.sleep(seconds)
        used, total = (after - start for after, start in zip(_ticks(), before, strict=True))
    except (OSError, ValueError, IndexError):
        return 0.0
    return used / total if total > 0 else 0.0


def _ticks() -> tuple[int, int]:
    """Of all cores since it was started: used by anybody or stolen, and all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def _add_to_sources(data: Any, text: str) -> None:
    """Says it in the provenance of every block that was measured."""
    for inner in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _add_to_sources(inner, text)
    source = data.get("provenance") if isinstance(data, dict) else None
    if isinstance(source, dict) and source["kind"] == "measured":
        data["provenance"] = {**source, "source": source["source"] + text}


def _say(text: str) -> None:
    """A line where people see it, also in notebooks and logs."""
    print(f"autopar: {text}", file=sys.stderr, flush=True)


def _window_file(points: Path, number: int) -> Path:
    return points.with_name(f"{points.name}.{number}") if number else points


def _points(script: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=_progress(), text=True, start_new_session=True
    )  # Ctrl-C is for this process, which ends that one with its children
    began, told, lines = time.monotonic(), _progress() is not None, 1
    while True:
        try:
            printed, complaints = process.communicate(timeout=min(1.0, LINE_SECONDS))
            break
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - began
            if told and elapsed >= lines * LINE_SECONDS:
                _say(f"measuring this host, {script.stem.partition('_')[2] or 'operators'}: {elapsed:.0f} s")
                lines += 1
            if elapsed > TIMEOUT_SECONDS:
                _end(process)
                raise ProfileError(
                    f"expected to measure this host within {TIMEOUT_SECONDS} s, found {' '.join(command)} still at it; "
                    "measure when the host is idle, or name a profile's JSON file"
                ) from None
            if is_interrupted():
                _end(process)
                raise Interrupted from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise ProfileError(
            f"expected to measure this host, found exit code {process.returncode} from {' '.join(command)}: "
            f"{(complaints or '')[-500:]}; run that command to see why, or name a profile's JSON file"
        )
    points: dict[str, Any] = json.loads(printed)
    return points


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _progress() -> int | None:
    """Progress goes to the terminal when there is one; else what is written there is kept for the error."""
    return None if sys.stderr.isatty() else subprocess.PIPE


def _write_whole(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            json.dump(data, file, indent=1)
            file.flush()
            os.replace(file.name, path)
        except BaseException:  # a full disk, say
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


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
