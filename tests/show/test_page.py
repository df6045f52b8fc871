"""The report's page, by clicking in a browser: what it shows is what the plan and its simulated step say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir.graph import Graph
from autopar.ir.mesh import coordinates
from autopar.ir.placement import local_shape
from autopar.ir.plan import GraphPlan, Move, Plan, Refinement, Rewriting, Substitution
from autopar.ir.tried import Tried
from autopar.pipeline import template_of_graph
from autopar.show import report
from autopar.show.text import bytes_text, time_text
from autopar.trace import trace
from models import gpt
from tests.show.conftest import Page

GUTTER, RULER, ROW = 132, 22, 20  # of the timeline's canvas


@cache
def graph_of(mode: str) -> Graph:
    """A GPT of four layers whose vocabulary no axis divides."""
    config = gpt.Config(num_layers=4, hidden_size=32, vocab_size=97, seq_len=16)
    return trace(gpt.build(config), gpt.example_inputs(config), mode=mode)


@cache
def plan_of(mesh: str = "a100:8", mode: str = "train", **template: Any) -> Plan:
    return template_of_graph(graph_of(mode), autopar.Mesh.parse(mesh), mode=mode, **template)


def staged() -> Plan:
    return plan_of(dp=2, tp=2, pp=2, microbatches=4, recompute="full")


def sharded() -> Plan:
    return plan_of(dp=4, tp=2, zero=3)


@cache
def html_of(*makes: Any) -> str:
    """The page of plans by the functions that make them."""
    return report.page(*(make() for make in makes))


@pytest.fixture
def page(browser: Page, tmp_path: Path, request: pytest.FixtureRequest) -> Page:
    """The page of the test's plans, which says nothing to the console and asks for nothing but itself."""
    (tmp_path / "plan.html").write_text(html_of(*request.param))
    browser.open(tmp_path / "plan.html")
    request.addfinalizer(lambda: _is_quiet(browser, tmp_path / "plan.html"))
    return browser


def _is_quiet(browser: Page, path: Path) -> None:
    assert browser.complaints() == []
    assert browser.requests() == {path.as_uri()}


def shows(*plans: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [plans], indirect=True, ids=[""])


@shows(staged)
def test_the_page_says_what_the_plan_predicts(page: Page) -> None:
    values = [value.text for value in page.all(".figure .value")]
    told = staged().predicted
    assert told.step_time_interval_ns is not None and told.taken_bytes is not None
    times = " to ".join(map(time_text, told.step_time_interval_ns))
    assert values[:4] == [
        time_text(told.step_time_ns), times, bytes_text(told.peak_bytes), bytes_text(told.taken_bytes)
    ]  # fmt: skip
    assert "cut into 2 pipeline stages (1f1b), each dp=2 × tp=2" in page.one(".sentence").text.replace("\xa0", " ")
    stages = [row.text.replace("\xa0", " ") for row in page.all("#stages tbody tr")]
    assert "ranks 0–3" in stages[0] and "2 blocks, layers.2 to layers.3" in stages[1]


@shows(sharded)
def test_the_tree_unfolds_and_equal_blocks_are_one_row(page: Page) -> None:
    unfolded = page.rows()
    assert any("layers.0–3×4" in name for name in unfolded) and not any("layers.1" in name for name in unfolded)
    page.click(page.row("layers.0"))
    folded = page.rows()
    assert len(folded) < len(unfolded) and set(folded) - {"▸layers.0–3×4"} <= set(unfolded)
    page.click(page.row("layers.0"))
    assert page.rows() == unfolded
    page.click(page.row("layers.0.mlp"))
    page.click(page.row("layers.0.mlp.up"))
    tiles = page.row("layers.0.mlp.up/parameter/layers.0.mlp.up.weight").find_elements("css selector", ".tile")
    storage = sharded().stage.storage["layers.0.mlp.up.weight"].placement
    assert [tile.text for tile in tiles][: len(storage)] == [
        str(kind).replace("(", "").replace(")", "") for kind in storage
    ]
    assert tiles[0].get_attribute("title") == f"dp=4: S{storage[0].dim}, slices along dim {storage[0].dim}"


@shows(sharded)
def test_the_tree_is_worked_by_keys(page: Page) -> None:
    page.run("document.querySelector('.row').focus()")
    send = page.driver.switch_to.active_element.send_keys
    assert page.run("return document.activeElement.dataset.key") == "(model)"
    send("\ue012")  # left: folds
    assert page.rows() == ["▸GPT"]
    page.driver.switch_to.active_element.send_keys("\ue014")  # right: unfolds
    assert len(page.rows()) > 3
    page.driver.switch_to.active_element.send_keys("\ue015")  # down
    assert page.run("return document.activeElement.dataset.key") == "/input/tokens"
    page.driver.switch_to.active_element.send_keys("\ue007")  # enter
    assert page.one(".details h3").text == "tokens"


@shows(sharded)
def test_every_device_tells_the_slice_that_it_holds(page: Page) -> None:
    """Of the vocabulary of 97 rows over an axis of 4, which 97 is no multiple of."""
    plan = sharded()
    name, storage = "embedding.token.weight", plan.stage.storage["embedding.token.weight"].placement
    page.one(".find").send_keys(name)
    page.click(page.row(f"embedding.token/parameter/{name}"))
    cells = page.all(".details .device")
    assert len(cells) == 8
    for rank, coordinate in enumerate(coordinates(plan.stage.axes)):
        page.run("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", cells[rank])
        told = page.one(".caption").text
        shape = local_shape((97, 32), storage, plan.stage.axes, coordinate)
        spans = [(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", told.partition("[")[2])]
        whole = [(0, 97), (0, 32)]
        cut = [
            whole[dim] if part == ":" else None
            for dim, part in enumerate(told.partition("[")[2].partition("]")[0].split(", "))
        ]
        lengths = [b - a for a, b in (span or spans.pop(0) for span in cut)]
        assert told.startswith(f"rank {rank} (dp={coordinate[0]}, tp={coordinate[1]}): ")
        assert tuple(lengths) == shape


@shows(sharded)
def test_a_tensor_tells_why_it_is_placed_so(page: Page) -> None:
    choice = next(one for one in sharded().choices if one.name == "layers.0.mlp.up.weight" and one.alternatives)
    page.one(".find").send_keys("mlp.up.weight")
    page.click(page.row("layers.0.mlp.up/parameter/layers.0.mlp.up.weight"))
    text = page.one(".details").text
    assert f"Chosen of {choice.num_options} options: {choice.chosen}" in text and "in 4 equal blocks together" in text
    rows = page.all(".details tbody tr")
    assert [row.text.startswith(item.option) for row, item in zip(rows, choice.alternatives, strict=True)] == [
        True
    ] * len(rows)


@shows(sharded)
def test_the_search_box_finds_operators_by_source_line(page: Page) -> None:
    box = page.one(".find")
    box.send_keys("models/gpt.py")
    assert "rows found" in page.one(".modules [role=status]").text
    everything = len(page.rows())
    page.one(".find").send_keys("zzz")
    assert page.rows() == [] and "0 rows found" in page.one(".modules [role=status]").text
    assert everything > 10


@shows(staged)
def test_the_timeline_zooms_and_moves(page: Page) -> None:
    whole = page.one(".window").text
    page.press("zoom in")
    closer = page.one(".window").text
    page.press("later")
    later = page.one(".window").text
    page.point("canvas.timeline", GUTTER + 200, RULER + 5, scroll=-200)
    wheeled = page.one(".window").text
    page.one("canvas.timeline").send_keys("+")
    keyed = page.one(".window").text
    assert len({whole, closer, later, wheeled, keyed}) == 5
    page.press("show the whole step")
    assert page.one(".window").text == whole


@shows(staged)
def test_pointing_at_tasks_tells_their_exact_times(page: Page) -> None:
    timeline = staged().timeline()
    width = page.run("return document.querySelector('canvas.timeline').clientWidth") - GUTTER
    own = [event for event in timeline.events if event.stream == (0, "compute")]
    for event in sorted(own, key=lambda event: event.start_ns - event.end_ns)[:10]:
        middle = (event.start_ns + event.end_ns) / 2
        page.point("canvas.timeline", GUTTER + width * middle / timeline.step_time_ns, RULER + ROW / 2)
        tip = page.one(".canvas .tip").text
        assert f"{event.end_ns - event.start_ns:,} ns" in tip
        assert f"from {event.start_ns:,} to {event.end_ns:,} ns" in tip
        assert event.name.split(" #")[0] in tip and "stage 0" in tip


@shows(staged)
def test_memory_over_time_tells_the_exact_peak_of_each_stage(page: Page) -> None:
    lanes = staged().timeline().lanes
    peaks = [page.one("#memory p.note").text]
    for label in ("stage 0", "stage 1"):
        page.click(next(button for button in page.all("#memory .lanes button") if button.text == label))
        peaks.append(page.one("#memory p.note").text)
    assert [f"{lane.peak_bytes:,} B" in text for lane, text in zip(lanes, peaks[1:], strict=True)] == [True, True]
    assert peaks[0] == max(peaks[1:], key=lambda text: int(re.sub(r"\D", "", text.partition("holds")[2])))
    page.point("canvas.memory", GUTTER + 300, 120)
    assert re.search(r"[\d,]+ B \(", page.one("#memory .tip").text)


@shows(staged)
def test_communication_is_told_by_axis_and_kind(page: Page) -> None:
    heads = [head.text for head in page.all("#traffic table.traffic th")]
    assert [head.partition(",")[0] for head in heads[1:]] == ["between stages", "dp=2", "tp=2"]
    lane = max(staged().timeline().lanes, key=lambda lane: sum(lane.comm_bytes.values()))
    cells = page.all("#traffic table.traffic tbody tr")
    rows = {row.find_elements("css selector", "td")[0].text: row for row in cells}
    sent = lane.along[1, "activation all_reduce"]
    assert bytes_text(sent.num_bytes) in rows["activation all-reduce"].find_elements("css selector", "td")[3].text


@shows(staged, sharded)
def test_two_plans_are_compared(page: Page) -> None:
    assert len(page.all("#model .column")) == 2
    differences = page.one("#difference").text
    assert "axes: 2 stages, 1f1b, each dp=2 × tp=2 | dp=4 × tp=2" in differences
    assert page.all("#model .differs"), "what the other plan places in another way is marked"
    page.press("B")
    assert len(page.all("#model .column")) == 1 and "seen as dp=4" in page.one(".sentence").text
    page.press("A")
    assert "cut into 2 pipeline stages" in page.one(".sentence").text
    page.press("side by side")
    page.click(page.row("(model)", column=1))
    assert page.all(".tree")[1].find_elements("css selector", ".row")[0].get_attribute("aria-expanded") == "false"


def from_file() -> Plan:
    return Plan.from_json(staged().to_json())


@shows(from_file)
def test_a_plan_from_a_file_shows_all_but_its_step_and_says_how_to_get_that(page: Page) -> None:
    assert not page.all("canvas")
    assert "plan=plan).plan.report(" in page.one("#timeline").text
    assert page.all("#model .row") and page.all("#traffic .meter") and page.all("#memory .part")


HOSTILE = "<script>hacked = 1</script><img src=x onerror='hacked = 1'>"


GRAPHS = GraphPlan({}, 9, "2", 1, 1, 8, HOSTILE), GraphPlan({HOSTILE: 2}, 7, HOSTILE, 2, 4, None, "")


def hostile() -> Plan:
    """Every name that a plan may bring is a page of its own."""
    plan = staged()
    return replace(
        plan,
        model=f"{HOSTILE}{plan.model}</script><!--<script>",
        scopes={name: f"{HOSTILE.replace('.', '_')}|{HOSTILE}|{HOSTILE}" for name in plan.scopes},
        parameters={tensor: f"{HOSTILE}.{name}" for tensor, name in plan.parameters.items()},
        types=dict.fromkeys(plan.types, f"{HOSTILE}[3, 4]"),
        coverage={HOSTILE: HOSTILE},
        sources={HOSTILE: HOSTILE},
        recompute=(HOSTILE,),
        substitutions=(
            Substitution(HOSTILE, HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), (HOSTILE,), {HOSTILE: HOSTILE}, 5),
        ),
        search=replace(
            plan.search,
            method=HOSTILE,
            tried=(Tried(mesh=HOSTILE, setting=HOSTILE, step_time_ns=5),),
            rewriting=Rewriting(3, HOSTILE, 0.5, GRAPHS),
        ),
    )


@shows(hostile, hostile)
def test_names_in_a_plan_are_text_and_never_run(page: Page) -> None:
    page.run("for (const row of document.querySelectorAll('.row.module, .row.more')) row.click()")
    page.run("for (const row of document.querySelectorAll('.row:not(.module)')) row.click()")
    assert page.run("return typeof hacked") == "undefined"
    assert page.all("img") == [] and len(page.all("main script")) == 0
    assert page.one("h1").text.startswith(HOSTILE)
    assert HOSTILE in page.one("#substitutions").text and HOSTILE in page.one("#search").text


@shows(hostile)
def test_equal_graphs_that_were_planned_are_shown_with_what_came_of_them(page: Page) -> None:
    text = page.one("#substitutions .graphs").text
    assert "the graph as it is" in text and "×2" in text and "2 stages, 4 microbatches" in text
    assert "led to 3 graphs" in text


def one_device() -> Plan:
    return plan_of("cpu:1")


def inference() -> Plan:
    return plan_of("h100:2", tp=2, mode="inference")


def interleaved() -> Plan:
    return plan_of("h100:2", pp=2, microbatches=4, schedule="interleaved", chunks=2)


def zero_bubble() -> Plan:
    return plan_of("h100:2", pp=2, microbatches=4, schedule="zero_bubble")


def unequal() -> Plan:
    return plan_of("a100:1x2+v100:1x2", dp=4, split="speed")


LANES = {one_device: 1, inference: 1, interleaved: 2, zero_bubble: 2, unequal: 2}


@pytest.mark.parametrize(
    ("page", "make"), [([make], make) for make in LANES], indirect=["page"], ids=[make.__name__ for make in LANES]
)
def test_plans_of_all_kinds_are_shown(page: Page, make: Any) -> None:
    """And every row of their trees can be unfolded and chosen."""
    assert len(page.all("#timeline details tbody tr")) == LANES[make]
    keys = "[...document.querySelectorAll(arguments[0])].map((row) => row.dataset.key)"
    click = 'document.querySelector(`[data-key="${key}"]`)?.click()'
    for rows in (".row.module[aria-expanded=false]", ".row:not(.module)"):
        page.run(f"for (const key of {keys}) {click}", rows)
    page.press("show a few passes in the middle")
    assert page.one(".details h3").text
    pixels = (
        "const canvas = document.querySelector('canvas.timeline'); const c = canvas.getContext('2d'); "
        "return new Set(new Uint32Array(c.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"
    )
    assert page.run(pixels) > 4, "passes are drawn in their colours"


def refined() -> Plan:
    moves = (Move("layers.0.mlp.up", "attribute", 4, "[S(0) R]", "[S(1) R]", 3_000_000),)
    found = Refinement(
        "dp=2", 100_000_000, 91_000_000, 4000, 900, 3.2, 7, "budget", {"attribute": (1500, 300)},
        {"dp=2": (100_000_000, 91_000_000), "megatron": (120_000_000, 95_000_000)},
        ((0, 100_000_000, 100_000_000), (2000, 99_000_000, 95_000_000), (4000, 93_000_000, 91_000_000)), moves,
    )  # fmt: skip
    return replace(staged(), search=replace(staged().search, refinement=found))


@shows(refined)
def test_a_refinement_is_shown_with_its_curve_rates_starts_and_moves(page: Page) -> None:
    text = page.one("#search .refinement").text
    assert (
        "100 ms became 91 ms (−9 %)" in text and "20 %" in text and "dp=2 (kept)" in text and "layers.0.mlp.up" in text
    )
    best = page.one("#search polyline.best").get_attribute("points").split()
    heights = [float(point.partition(",")[2]) for point in best]
    assert len(best) == 3 and heights == sorted(heights), "down the page is faster"


def not_refined() -> Plan:
    found = Refinement("the plan", 100_000_000, 100_000_000, 0, 0, 0.0, 0, "the devices are of several kinds")
    return replace(staged(), search=replace(staged().search, refinement=found))


@shows(not_refined)
def test_why_a_plan_was_not_refined_is_shown(page: Page) -> None:
    assert page.one("#search .refinement").text == (
        "Not refined by a random walk (MCMC): the devices are of several kinds."
    )


@shows(staged)
def test_the_page_is_as_wide_as_a_phone_and_dark_when_asked(page: Page) -> None:
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    page.press("light or dark")
    assert page.run("return getComputedStyle(document.body).backgroundColor") != light
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        assert page.run("return document.documentElement.scrollWidth") <= 390, "nothing hangs out"
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
