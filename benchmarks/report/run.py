"""How fast the report of a large plan opens, and how large it is: Llama-3-405B on 1,024 h100.

    python -m benchmarks.report.run [--plan plan.json] [--repeats 7] [--picture docs/plan.png]

Opening is measured in headless Chromium, in a new browser with an empty profile each time: from the start of the
navigation to the page's own mark `ready`, two frames after everything was laid out and drawn. The plan is found anew
unless a file is given. Limits: 2 s and 5 MB. --picture writes a picture of the page for the README; that takes pillow.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import autopar
from autopar.ir.plan import Plan
from autopar.pipeline import planned, with_timeline
from autopar.request import Request, SearchBudget
from autopar.trace import trace
from benchmarks.facts import facts
from benchmarks.plan_time.run import llama_405b
from benchmarks.report.browser import missing, open_browser, open_page

LIMIT_MS, LIMIT_BYTES = 2000.0, 5_000_000
MESH = "h100:128x8"
PICTURE_WIDTH, PICTURE_SCALE = 1280, 0.6

# The page as the README shows it: a block unfolded, one of its parameters chosen, a few passes of the step.
UNFOLD = """
const click = (key) => document.querySelector(`[data-key="${key}"]`)?.click();
document.querySelectorAll('.row.module[aria-expanded="true"]').forEach((row) => click(row.dataset.key));
['(model)', 'model', 'model.layers.0', 'model.layers.0.mlp', 'model.layers.0.mlp.down_proj'].forEach((key) => {
  if (document.querySelector(`[data-key="${key}"]`)?.getAttribute('aria-expanded') === 'false') click(key);
});
click('model.layers.0.mlp.down_proj/parameter/model.layers.0.mlp.down_proj.weight');
document.activeElement.blur();
document.querySelector('[aria-label="show a few passes in the middle"]').click();
"""


def plan_of(path: Path | None) -> Plan:
    """The plan with its timeline; read from a file if one is given."""
    model, inputs, _ = llama_405b()
    if path is not None:
        return with_timeline(Plan.load(path), model, inputs)
    request = Request(autopar.Mesh.parse(MESH), "train", "adamw", None, (), SearchBudget(stages=True))
    return with_timeline(planned(trace(model, inputs), request), model, inputs)


def opening_ms(page: Path) -> float:
    """Of a browser that has never seen the page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = open_browser(Path(profile))
        try:
            open_page(driver, page)
            return float(driver.execute_script("return performance.getEntriesByName('ready')[0].startTime"))
        finally:
            driver.quit()


def photograph(page: Path, picture: Path) -> None:
    """The model and the timeline, as the README shows them, in few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = open_browser(Path(profile), PICTURE_WIDTH)
        try:
            open_page(driver, page)
            driver.execute_script(UNFOLD)
            edges = "['model', 'timeline'].map((id) => document.getElementById(id).getBoundingClientRect())"
            top, bottom = driver.execute_script(f"const [a, b] = {edges}; return [a.top + scrollY, b.bottom + scrollY]")
            clip = {"x": 0, "y": top - 12, "width": PICTURE_WIDTH, "height": bottom - top + 24, "scale": PICTURE_SCALE}
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        finally:
            driver.quit()
    picture.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, help="a plan of the model for the mesh, instead of a search")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--page", type=Path, default=Path("out/llama-405b.html"), help="where the page is written")
    parser.add_argument("--picture", type=Path, help="also write a picture of the page")
    arguments = parser.parse_args()
    if problem := missing():
        raise SystemExit(problem)
    plan = plan_of(arguments.plan)
    started = time.perf_counter()
    plan.report(arguments.page)
    write_seconds = time.perf_counter() - started
    if arguments.picture:
        photograph(arguments.page, arguments.picture)
    runs = [opening_ms(arguments.page) for _ in range(arguments.repeats)]
    report = _report(arguments, plan, runs, write_seconds)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def _report(arguments: argparse.Namespace, plan: Plan, runs: list[float], write_seconds: float) -> dict[str, Any]:
    size = arguments.page.stat().st_size
    return {
        **facts("benchmarks.report.run"),
        "plan": f"{plan.model} on {plan.mesh}: {len(plan.stages)} stages, {plan.microbatches} microbatches",
        "open_ms": {"median": statistics.median(runs), "worst": max(runs), "runs": runs, "limit": LIMIT_MS},
        "bytes": {"page": size, "limit": LIMIT_BYTES},
        "write_seconds": write_seconds,
        "within_limits": max(runs) < LIMIT_MS and size < LIMIT_BYTES,
    }


if __name__ == "__main__":
    main()
