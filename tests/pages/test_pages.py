"""The generated pages say what the sources say now."""

from __future__ import annotations

import re

import pytest

from docs.generate import FOLDER, PAGES
from tests.conftest import difference
from tests.test_house import ROOT

MOST_BYTES = 200_000


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_its_sources_say(name: str) -> None:
    kept, made = (FOLDER / name).read_text(encoding="utf-8"), PAGES[name]()
    if kept != made:
        pytest.fail(f"docs/{name} is behind its sources; run python -m docs.generate:\n{difference(kept, made)}")
    assert len(made.encode()) < MOST_BYTES


def test_every_link_in_the_pages_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {
        page: re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages
    }
    links = [(page, link) for page, text in texts.items() for link in re.findall(r"\]\(([^)#\s]+)", text)]
    assert [link for page, link in links if "://" not in link and not (page.parent / link).exists()] == []
