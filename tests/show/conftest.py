"""A headless Chromium that tests click in; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.browser import missing, open_browser, open_page


@dataclass
class Page:
    """An open page: clicks, and what they show."""

    driver: Any

    def open(self, path: Path) -> None:
        """Opens a file, which must say that it is ready."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        open_page(self.driver, path)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def rows(self, selector: str = ".column .row") -> list[str]:
        """The names of the rows that the tree shows."""
        return [self.run("return arguments[0].querySelector('.name').textContent", row) for row in self.all(selector)]

    def row(self, key: str, column: int = 0) -> Any:
        """The row of the tree for a module's path or a tensor's key."""
        return self.all(".column .tree")[column].find_element("css selector", f'[data-key="{key}"]')

    def press(self, label: str) -> None:
        """Clicks the button with a label."""
        (button,) = [one for one in self.all("button") if label in (one.text, one.get_attribute("aria-label"))]
        self.click(button)

    def click(self, element: Any) -> None:
        """A click with the mouse, in the middle of the window, where the page's head covers nothing."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def point(self, selector: str, x: float, y: float, scroll: int = 0) -> None:
        """Moves the mouse to a place of an element, in pixels from its corner; with ctrl held, turns the wheel."""
        element = self.one(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        left, top = self.run("const box = arguments[0].getBoundingClientRect(); return [box.x, box.y]", element)
        place = {"x": left + x, "y": top + y}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
        if scroll:
            wheel = {"type": "mouseWheel", "deltaX": 0, "deltaY": scroll, "modifiers": 2, **place}
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)

    def complaints(self) -> list[str]:
        """What the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """What was asked for since a page was opened, but by the browser's own first page, which may still load."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome://")}


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests; what they open is made anew each time."""
    pytest.importorskip("selenium", reason="selenium is not installed")
    if problem := missing():
        pytest.skip(problem)
    driver = open_browser(tmp_path_factory.mktemp("chromium"))
    yield Page(driver)
    driver.quit()
