"""Kills processes while they save checkpoints, and damages checkpoints: what is found then.

    python -m benchmarks.checkpoints.run [KILLS DAMAGES]

Writes results.md: 200 kills and 50 damages by default.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from autopar.runtime.folder import MANIFEST
from benchmarks.facts import facts
from tests.runtime.crashes import DAMAGES, Run, damaged, killed

HERE = Path(__file__).parent


def kills(folder: Path, count: int) -> Counter[str]:
    """What was found after each of `count` kills in one folder."""
    found: Counter[str] = Counter()
    saved: list[int] = []
    for seed in range(count):
        new, value = killed(folder, seed)
        saved += new
        if value > saved[-1]:
            found["the one under way, which was whole already"] += 1
        else:
            place = saved[::-1].index(value)
            found[["the last saved", "the last but one"][place] if place < 2 else "an older one: WRONG"] += 1
    found["(checkpoints saved meanwhile)"] = len(saved)
    return found


def damages(folder: Path, count: int) -> Counter[str]:
    """What was loaded after each damage of the last of two checkpoints."""
    found: Counter[str] = Counter()
    draw = random.Random(0)
    for seed in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        run = Run(folder)
        run.save(1, 1)
        run.save(2, 2)
        name, damage = draw.choice(["__0_0.distcp", ".metadata", MANIFEST]), draw.choice(list(DAMAGES))
        step, told = damaged(folder, name, damage, seed)
        outcome = "told, and the one before loaded" if step == 1 and told else f"step {step} loaded, told: {bool(told)}"
        found[f"{name} {damage}: {outcome}"] += 1
    return found


def main(num_kills: int = 200, num_damages: int = 50) -> None:
    """Writes what was found to results.md."""
    logging.disable(logging.CRITICAL)  # torch's, of each step of a checkpoint
    with tempfile.TemporaryDirectory() as folder:
        after_kills = kills(Path(folder) / "kills", num_kills)
        after_damages = damages(Path(folder) / "damages", num_damages)
    told = facts("benchmarks.checkpoints.run")
    lines = [
        "# Checkpoints after kills and damage", "", f"`{told['command']}`, {told['machine']}, {told['date']}", "",
        f"Found after {num_kills} kills (SIGKILL at a random instant, up to 150 ms after the first save of a process",
        "that saves one checkpoint after the other, each step up to three times, in a folder that all share):", "",
        *(f"- {what}: {count}" for what, count in sorted(after_kills.items())), "",
        f"Loaded after {num_damages} damages of the last of two:", "",
        *(f"- {what}: {count}" for what, count in sorted(after_damages.items())),
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
