"""Debian's Chromium, driven headless; without it, these tests are skipped and say so."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import PATIENCE
from tests.tracked import Tracked
from tests.tracking.servers import Server


class Browser:
    """A window of Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> Browser:
        # A new document each time: MLflow's routes differ after the "#" alone.
        self.driver.get("about:blank")
        self.driver.get(address)
        return self

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    @property
    def text(self) -> str:
        return str(self.run("return document.body ? document.body.innerText : ''"))

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := until():
                return found
            time.sleep(0.3)
        raise AssertionError(f"{what} did not appear; the page says: {self.text[:2000]}")

    def wait_for(self, *texts: str) -> None:
        for text in texts:
            self.wait(lambda wanted=text: wanted in self.text, repr(text))

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path) -> None:
        self.driver.save_screenshot(str(path))

    def errors(self) -> list[str]:
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]


def chromium() -> Any:
    """A driver of Chromium; skips without one."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1600,1000",
        # As with a mouse: without one, Plotly's buttons always lie over MLflow's charts.
        "--blink-settings=primaryHoverType=2,availableHoverTypes=2",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(chromedriver)
    return webdriver.Chrome(options=options, service=service)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    driver = chromium()
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="session")
def ui(
    browser: Browser, tracked: Tracked, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """``privtune ui`` itself, as a user starts it; the browser has been let in."""
    server = Server.ui(tracked.study.storage, tmp_path_factory.mktemp("ui"), "--no-browser")
    server.start()
    browser.open(server.address).wait(
        lambda: browser.run("return location.search") == "" and browser.text, "MLflow"
    )
    yield server
    server.stop()
