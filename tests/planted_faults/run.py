"""Plants faults one at a time in a copy of the tree and says what caught each: python -m tests.planted_faults.run

A fault is caught when a check of its own, or else the general ones, find something wrong. Each fault has a process of
its own, forked from one that has imported torch but nothing of this repository. Ends with 1 when a fault was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
GENERAL = ("random", "mutants")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose name or file has one of these texts")
    parser.add_argument("--part", default="1/1", help="such as 2/3: the second third of the faults")
    parser.add_argument("--start", type=int, default=0, help="leave out the first so many faults")
    parser.add_argument("--control", action="store_true", help="plant nothing: no check may find anything")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    named = [fault for fault in FAULTS if any(text in fault.name or text in fault.file for text in arguments.only)]
    chosen = named[arguments.start :][part - 1 :: parts]
    missed = []
    if arguments.control:
        return control([check for fault in chosen for check in (*fault.checks, *GENERAL)])
    with copied_tree() as tree:
        for fault in chosen:
            started = time.monotonic()
            caught = try_fault(tree, fault)
            print(f"{'caught' if caught else 'MISSED'} {fault.name} ({fault.file}, {time.monotonic() - started:.0f} s)")
            print(f"       {caught[:160]}", flush=True)
            missed += [] if caught else [fault]
    print(f"{len(chosen)} faults planted, {len(chosen) - len(missed)} caught, {len(missed)} missed")
    return 1 if missed else 0


def control(checks: list[str]) -> int:
    """Runs each check on the tree as it is; 1 when one finds something."""
    wrong = 0
    with copied_tree() as tree:
        for check in dict.fromkeys(checks):
            found = in_child(tree, (check,))
            wrong += bool(found)
            print(f"{'WRONG ' if found else 'nothing'} {check} {found[:300]}", flush=True)
    return 1 if wrong else 0


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows, for the time being."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for name in names:
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        yield Path(folder)


def try_fault(tree: Path, fault: Fault) -> str:
    """What catches the fault; empty when nothing does. The tree is left as it was."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.name}: expected its old text once in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    general = tuple(check for check in GENERAL if check not in fault.checks)
    try:
        return in_child(tree, (*fault.checks, *general))
    finally:
        path.write_text(text, encoding="utf-8")


def in_child(tree: Path, checks: tuple[str, ...]) -> str:
    """Runs checks in the tree, in a process of their own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _check_and_exit(tree, checks, writer)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code != 3, "what was planted is no Python"
    return answer if code == 0 else f"the process ended with {code}"


def _check_and_exit(tree: Path, checks: tuple[str, ...], writer: int) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("autopar", "tests", "models")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in (str(ROOT), ""))]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True
    try:
        from tests.planted_faults.checks import first_catch

        found = first_catch(checks)
    except (ImportError, NameError, SyntaxError):  # a fault that is none: what it writes does not even run
        os._exit(3)
    except BaseException:
        found = f"an error while planning: {traceback.format_exc().strip().splitlines()[-1]}"
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        pipe.write(found)
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch.distributed.tensor
    import torch.export  # noqa: F401  (once for all children)

    sys.exit(main())
