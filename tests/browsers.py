"""A Chromium for tests of pages: any that the machine has; and visits to `posttrain watch` in it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from posttrain.apps.serve.listener import listen
from posttrain.apps.watch.access import Access
from posttrain.apps.watch.app import WatchServer
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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


@contextmanager
def watching(home: Path, access: Access | None = None) -> Iterator[str]:
    """The dashboard over `home`; its address."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        server = WatchServer(Catalogue([LocalPlace(home)]), access or Access(None), ready.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert ready.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)


class Visit:
    """A page with what it said to the console and what it asked for."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.set_default_timeout(60_000)

    def run(self, name: str) -> str:
        runs = self.page.request.get(f"{self.address}api/runs").json()["runs"]
        return str(next(run["id"] for run in runs if run["name"] == name))

    def go(self, path: str, until: str) -> None:
        self.page.goto(f"{self.address}#{path}")
        self.page.locator(until).first.wait_for()


@contextmanager
def visiting(browser: Browser, address: str, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    visit = Visit(context.new_page(), address)
    yield visit
    context.close()
    assert visit.problems == []
    assert visit.hosts <= {urlsplit(address).netloc}, "a request left the machine"
