"""A Chromium for tests of pages: any that the machine has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VARIABLE = "POSTTRAIN_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
COMMAND = "apt-get install chromium (Debian), or: playwright install chromium"


def find_chromium() -> str | None:
    """The path of a Chromium: that of the variable, on the PATH, or installed by Playwright."""
    named = os.environ.get(VARIABLE)
    found = [named] if named else [path for name in NAMES if (path := shutil.which(name))]
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    found += [
        str(path)
        for path in sorted(cache.glob("chromium*/chrome-linux*/*"))
        if path.name in ("chrome", "headless_shell")
    ]
    return found[0] if found else None


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test if there is no browser, with the command that installs one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = find_chromium()
    if path is None:
        pytest.skip(f"no Chromium on this machine; {COMMAND}, or name one in {VARIABLE}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()
