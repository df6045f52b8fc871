"""A page that shows a ladder: curves with their knees, the front of time and money, and the table. No script in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from autopar.ir.naming import printable
from autopar.ladders.rungs import KNEE, Ladder, Rung
from autopar.ladders.text import HEAD, capacity_lines, overtaken_lines, rung_row

WIDTH, HEIGHT, MARGIN = 640, 320, 56
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5ea8", "#8c6d31")
STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1a1f26, #e7eaef); --edge: light-dark(#d5dae1, #363d49);
  --faint: light-dark(#5d6673, #99a3b1); --paper: light-dark(#ffffff, #14171c); }
body { margin: 1.5rem auto; max-width: 82rem; padding: 0 1rem; font: 14px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
table { border-collapse: collapse; font-size: 12px; } td, th { padding: 2px 8px; border-bottom: 1px solid var(--edge);
  text-align: left; white-space: nowrap; } .wide { overflow-x: auto; }
text { fill: var(--faint); font-size: 11px; }
svg { max-width: 100%; height: auto; } .axis { stroke: var(--edge); }
figure { display: inline-block; margin: 0 1rem 0 0;
  vertical-align: top; } figcaption { color: var(--faint); max-width: 40rem; }
"""


class Line(NamedTuple):
    """A curve of a chart, and which of its points are marked."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: Sequence[int] = ()
    is_joined: bool = True


def ladder_page(ladder: Ladder) -> str:
    """The page's HTML, with all that it needs inside."""
    title = escape(printable(f"Ladder of {ladder.model}"))
    parts = [f"<h1>{title}</h1>", *_charts(ladder), *_capacity(ladder), _table(ladder)]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{STYLE}</style></head>\n'
        f"<body>{chr(10).join(parts)}</body></html>\n"
    )


def _charts(ladder: Ladder) -> Iterator[str]:
    curves = ladder.curves
    if not curves:
        return
    speed = [
        Line(
            f"{kind}, batch {batch}", [(rung.devices, rung.tokens_s or rung.samples_s) for rung in rungs],
            [rungs.index(ladder.knee(kind, batch))] if len(rungs) > 1 else [],
        )
        for (kind, batch), rungs in curves.items()
    ]  # fmt: skip
    unit = "tokens" if all(rung.tokens_s for rung in ladder.fitting) else "samples"
    told = (
        f"Throughput by devices, both logarithmic. A ring marks the knee: the last rung up to which each more device "
        f"brings at least {KNEE:.0%} of what one brought on the rung before."
    )
    yield _figure(chart(speed, "devices", f"{unit} a second"), told)
    efficiency = [
        Line(line.name, [(rung.devices, 100 * ladder.efficiency(rung)) for rung in rungs])
        for line, rungs in zip(speed, curves.values(), strict=True)
    ]
    yield _figure(
        chart(efficiency, "devices", "% of the fewest", is_log_y=False),
        "Throughput a device, of that on the fewest devices of its kind and batch.",
    )
    batches = [batch for batch in sorted({rung.global_batch for rung in ladder.fitting}) if ladder.front(batch)]
    if batches:
        fronts = [Line(f"batch {batch}", [*_time_and_money(ladder.front(batch))]) for batch in batches]
        rest = [rung for rung in ladder.fitting if rung.price is not None]
        fronts.append(Line("all rungs", [*_time_and_money(rest)], is_joined=False))
        yield _figure(
            chart(fronts, "seconds a million samples", "money a million samples"),
            "Time and money, both logarithmic: of the lines, no rung is both faster and cheaper than another.",
        )


def _time_and_money(rungs: Sequence[Rung]) -> Iterator[tuple[float, float]]:
    for rung in rungs:
        yield rung.seconds(1e6), max(1e-9, rung.money(1e6) or 0.0)


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _capacity(ladder: Ladder) -> Iterator[str]:
    if ladder.capacity is not None:
        lines = "\n".join(capacity_lines(ladder.capacity))
        yield f"<h2>What to take</h2><pre>{escape(printable(lines))}</pre>"


def _table(ladder: Ladder) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(rung_row(ladder, rung), "td") for rung in ladder.rungs)
    overtaken = "".join(f"<p>{escape(printable(line.strip()))}</p>" for line in overtaken_lines(ladder))
    return f'<h2>Rungs</h2>{overtaken}<div class="wide"><table>{row(HEAD, "th")}{body}</table></div>'


# Charts ----------------------------------------


def chart(lines: Sequence[Line], x_name: str, y_name: str, is_log_y: bool = True) -> str:
    """Lines over a logarithmic axis, as SVG."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    across = _scale(min(xs), max(xs), MARGIN, WIDTH - 8, math.log)
    low = min(ys) if is_log_y else 0.0
    up = _scale(low, max(ys), HEIGHT - 36, 12, math.log if is_log_y else float)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 18 * len(lines)}" width="{WIDTH}" role="img">']
    for x in sorted({*_ticks(min(xs), max(xs))}):
        parts.append(f'<line class="axis" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="12" y2="{HEIGHT - 36}"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{x:g}</text>')
    for y in _ticks(low, max(ys)) if is_log_y else range(0, int(max(ys)) + 1, 25):
        parts.append(f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - 8}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="4" y="10">{escape(y_name)}</text>')
    for number, line in enumerate(lines):
        parts += _drawn(line, COLOURS[number % len(COLOURS)], across, up, HEIGHT + 18 * number + 10)
    return "".join([*parts, "</svg>"])


def _drawn(
    line: Line, colour: str, across: Callable[[float], float], up: Callable[[float], float], legend: int
) -> Iterator[str]:  # fmt: skip
    places = [(across(x), up(y)) for x, y in line.points]
    if line.is_joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for number, (x, y) in enumerate(places):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        if number in line.marked:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="{colour}" stroke-width="2"/>'
    yield f'<rect x="{MARGIN}" y="{legend - 8}" width="10" height="10" fill="{colour}"/>'
    yield f'<text x="{MARGIN + 16}" y="{legend + 1}">{escape(printable(line.name))}</text>'


def _scale(
    low: float, high: float, begin: float, end: float, on: Callable[[float], float]
) -> Callable[[float], float]:  # fmt: skip
    first, last = on(low), on(high)
    span = (last - first) or 1.0
    return lambda value: begin + (on(value) - first) / span * (end - begin)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two where the range is short, else of ten."""
    base = 2.0 if high / low < 2000 else 10.0
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [base**power for power in range(first, last + 1)] or [low]
