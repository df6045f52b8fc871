"""A comparison of a traced run with the simulated step, as text, and as data for the page."""

from __future__ import annotations

from typing import Any

from autopar.observed.comparison import ComparedLine, StepComparison
from autopar.show.text import time_text

MOST = 20  # lines of the model that are shown
_ABOUT = {
    "operators": "what statements compute",
    "optimizer": "the update",
    "collectives": "what stops ranks",
    "waiting": "for the rank that comes last",
    "overlap": "what is sent beside compute, and holds it up",
    "stages": "messages of other stages, bubbles",
    "host": "launches, autograd, Python",
    "contention": "others on the cores: what is in no other row",
}


def comparison_text(found: StepComparison) -> str:
    """What was wrong, then the lines of the model that were most wrong."""
    first, count = found.ranks
    ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
    lines = [
        f"{found.model} on {found.mesh}: {ranks}, {found.num_steps} traced steps on {found.device}",
        f"  step        {time_text(found.predicted_ns)} predicted, {time_text(found.measured_ns)} measured, "
        f"{found.error:+.1%} ({time_text(found.busy_ns)} of a processor)",
        "",
        f"  {'what was wrong':<14}{'predicted':>12}{'measured':>12}{'difference':>12}",
    ]
    for cause in found.causes:
        if cause.predicted_ns or cause.measured_ns:
            times = (cause.predicted_ns, cause.measured_ns)
            told = "".join(f"{_time(ns):>12}" for ns in times) + f"{_signed(cause.difference_ns):>12}"
            lines.append(f"  {cause.name:<14}{told}  {_ABOUT[cause.name]}")
    lines += ["", f"  {'module':<32}{'line':<28}{'predicted':>12}{'measured':>12}{'difference':>12}"]
    lines += [_line(line) for line in found.lines[:MOST]]
    if len(found.lines) > MOST:
        lines.append(f"  and {len(found.lines) - MOST} more lines")
    if found.unseen:
        lines.append(f"  simulated and not seen: {', '.join(found.unseen[:8])}")
    return "\n".join(lines)


def comparison_data(found: StepComparison) -> dict[str, Any]:
    """What the page shows. Times in ns; nothing is formatted."""
    return {
        "ranks": list(found.ranks),
        "steps": found.num_steps,
        "device": found.device,
        "predicted_ns": found.predicted_ns,
        "measured_ns": found.measured_ns,
        "busy_ns": found.busy_ns,
        "causes": [[*cause, _ABOUT[cause.name]] for cause in found.causes if cause.predicted_ns or cause.measured_ns],
        "lines": [list(line) for line in found.lines],
        "statements": [
            [one.name, one.module, one.source, *one.total_ns, one.sent_predicted_ns, one.sent_measured_ns]
            for one in found.statements
        ],
        "unseen": list(found.unseen),
    }


def _line(line: ComparedLine) -> str:
    times = "".join(f"{time_text(ns):>12}" for ns in (line.predicted_ns, line.measured_ns))
    names = ", ".join(line.statements[:2]) + (f", {len(line.statements) - 2} more" if len(line.statements) > 2 else "")
    return f"  {line.module or '(model)':<32}{line.source:<28}{times}{_signed(line.difference_ns):>12}  {names}"


def _time(ns: int) -> str:
    return time_text(ns) if ns >= 0 else _signed(ns)


def _signed(ns: int) -> str:
    return f"{'+' if ns >= 0 else '−'}{time_text(abs(ns))}"
