"""Chromium without a window, for pages that are measured, tested and photographed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--force-prefers-reduced-motion",
    "--hide-scrollbars",
)  # fmt: skip


def missing() -> str | None:
    """What a browser lacks here, or None."""
    if _chromium() is None or shutil.which("chromedriver") is None:
        return "no Chromium with chromedriver here: apt-get install chromium chromium-driver"
    return None


def _chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def open_browser(profile: Path, width: int = 1280, height: int = 1000) -> Any:
    """A selenium driver of a browser that keeps what it remembers in the folder `profile`, which is new."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = _chromium()
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def open_page(driver: Any, path: Path) -> None:
    """Opens a report and waits until it says that it is ready."""
    driver.get(path.absolute().as_uri())
    wait = "const done = arguments[0], look = () => document.documentElement.dataset.ready ? done(true) : "
    driver.execute_async_script(wait + "requestAnimationFrame(look); look()")
