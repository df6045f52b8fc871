"""Reports without a browser: whole, small, safe; the command line; tables for terminals, cards for notebooks."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest
import rich.console

import autopar
from autopar import cli
from autopar.ir.plan import Plan
from autopar.show.report import page
from autopar.show.tree import model_tree, spans
from models import mlp
from tests.test_house import ROOT

HOSTILE = "[/red]<script>alert(1)</script>"


@cache
def plan_of(**template: Any) -> Plan:
    config = mlp.Config()
    return autopar.template_plan(
        mlp.build(config), autopar.Mesh.parse("h100:4"), mlp.example_inputs(config), **template
    )


def data_of(html: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_a_report_is_one_file_that_may_fetch_nothing(tmp_path: Path) -> None:
    plan_of(dp=4).report(tmp_path / "new" / "plan.html")
    html = (tmp_path / "new" / "plan.html").read_text()
    assert "default-src 'none'" in html and not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org)", html)


def test_a_report_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plan_of(dp=4).report(path)
    assert path.read_text() == "before" and [item.name for item in tmp_path.iterdir()] == ["plan.html"]


def test_text_of_a_plan_cannot_end_the_element_that_it_is_in() -> None:
    hostile = replace(plan_of(dp=4), model="</script><script>alert(1)</script><!--")
    html = page(hostile)
    assert data_of(html)["plans"][0]["model"] == hostile.model

    class Scripts(HTMLParser):
        found: ClassVar[list[dict[str, str | None]]] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "script":
                self.found.append(dict(attrs))

    Scripts().feed(html)
    assert Scripts.found == [{"type": "application/json", "id": "data"}, {}], "the data, and the page's own"


def test_equal_plans_make_equal_pages() -> None:
    plan = plan_of(dp=2, tp=2)
    assert page(plan) == page(plan)
    assert page(Plan.from_json(plan.to_json()), plan) != page(plan)


def test_every_node_and_parameter_is_in_the_tree_once() -> None:
    """Rows of folded siblings stand for as many as the fold says."""
    plan = plan_of(dp=2, tp=2)

    def count(module: Any, kind: str) -> int:
        own = sum(row["kind"] == kind for row in module["rows"])
        return module["count"] * (own + sum(count(child, kind) for child in module["modules"]))

    tree = model_tree(plan, [plan.stage.axes])
    assert count(tree, "operator") == len(plan.stage.nodes)
    assert count(tree, "parameter") == len(plan.stage.storage)
    assert count(tree, "input") == len(plan.stage.inputs)


def test_siblings_that_differ_below_are_not_folded() -> None:
    plan = plan_of(dp=4)
    name = next(name for name in plan.stage.storage if name.startswith("layers.1."))
    odd = replace(plan.stage.storage[name], regather=True)
    tree = model_tree(plan.placed(storage={**plan.stage.storage, name: odd}), [plan.stage.axes])
    (layers,) = [module for module in tree["modules"] if module["name"] == "layers"]
    assert "1" in [module["name"] for module in layers["modules"]]
    assert spans(["4", "0", "2", "1"]) == "0–2, 4" and spans(["head"]) == "head"


def test_the_command_writes_a_page_with_the_timeline_where_the_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    a, b, out = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "out.html"
    plan_of(dp=4).save(a)
    plan_of(dp=2, tp=2).save(b)
    assert cli.main(["report", str(a), "-o", str(out), "--compare", str(b)]) == 0
    assert [plan["timeline"] for plan in data_of(out.read_text())["plans"]] == [None, None]
    assert cli.main(["report", str(a), "models.mlp", "-o", str(out), "--compare", str(b)]) == 0
    steps = [plan["timeline"]["step_time_ns"] for plan in data_of(out.read_text())["plans"]]
    assert steps == [plan_of(dp=4).predicted.step_time_ns, plan_of(dp=2, tp=2).predicted.step_time_ns]
    assert capsys.readouterr().out.endswith(f"written to {out}; open it in a browser\n")
    assert cli.main(["report", str(a), "models.gpt", "-o", str(out)]) == 2, "of another model"
    assert "expected" in capsys.readouterr().err


def printed(plan: Plan) -> str:
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(plan)
    return console.file.getvalue()


def test_tables_on_a_terminal_say_what_the_text_says() -> None:
    plan = plan_of(dp=2, tp=2, zero=3)
    shown = printed(plan)
    assert str(plan).splitlines()[0] in shown
    for line in str(plan).splitlines():
        if line.startswith(("  traffic", "  search", "  coverage")):
            assert line in shown
    assert "gathered per use" in shown and "│ layers.*.weight" in shown
    assert "[/red]" in printed(replace(plan, model=HOSTILE, parameters=dict.fromkeys(plan.parameters, HOSTILE)))


def test_show_prints_tables_on_a_terminal_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(dp=4).save(tmp_path / "plan.json")
    assert cli.main(["show", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{plan_of(dp=4)}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["show", str(tmp_path / "plan.json")]) == 0
    assert "┃" in capsys.readouterr().out


def test_the_card_of_notebooks_is_static_and_escapes_names() -> None:
    plan = plan_of(dp=2, tp=2)
    html = replace(plan, model=HOSTILE, parameters=dict.fromkeys(plan.parameters, HOSTILE))._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html
    card = plan._repr_html_()
    assert "layers.*.weight</code>" in card and ">S1</span>" in card and "compute" in card
    assert len(card) < 20_000
