"""The report in a real browser: on a desk, on a phone, in the dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from privtune.views.report import render_study
from tests.browser.conftest import Browser
from tests.tracked import Tracked

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

INK = "return getComputedStyle(document.body).color"
PLOT_INK = "return document.querySelector('#arms .xtick text').style.fill"


@pytest.fixture(scope="module")
def report(tracked: Tracked, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_study(tracked.study), encoding="utf-8")
    return path.as_uri()


def drawn(browser: Browser) -> None:
    script = "return document.querySelectorAll('.plot .main-svg').length"
    browser.wait(lambda: browser.run(script) >= 4, "four figures")


def test_it_draws_without_errors_and_without_a_network(browser: Browser, report: str) -> None:
    browser.size(1200, 1000)
    browser.dark(False)
    browser.errors()
    browser.open(report)
    drawn(browser)
    assert browser.errors() == []
    loaded = browser.run("return performance.getEntriesByType('resource').map(e=>e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_it_fits_a_phone(browser: Browser, report: str) -> None:
    browser.size(390, 844, phone=True)
    browser.open(report)
    drawn(browser)
    # Nothing but the tables, which scroll by themselves, is wider than the screen.
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    boxes = browser.run(
        "const d=document.getElementById('arms').layout;return [d.xaxis.domain,d.xaxis3.domain]"
    )
    assert boxes == [[0, 1], [0, 1]], "panels stand one above the other"
    browser.size(1200, 1000)


def test_it_follows_the_reader_s_colours(browser: Browser, report: str) -> None:
    browser.dark(True)
    browser.open(report)
    drawn(browser)
    dark = (browser.run(INK), browser.run(PLOT_INK))
    browser.dark(False)
    browser.wait(lambda: browser.run(PLOT_INK) != dark[1], "another ink in the figures")
    assert browser.run(INK) != dark[0]


def test_a_screen_reader_finds_its_way(browser: Browser, report: str) -> None:
    browser.open(report)
    drawn(browser)
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return document.querySelectorAll('h1').length") == 1
    assert browser.run("return document.querySelectorAll('table:not(:has(caption))').length") == 0
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    images = [n for n in tree if n.get("role", {}).get("value") in ("image", "img")]
    named = [n["name"]["value"] for n in images if n.get("name", {}).get("value")]
    assert any("95% intervals" in name for name in named)
