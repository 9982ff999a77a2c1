"""MLflow's UI as a team sees it: the format of its saved views is held against the real page."""

from __future__ import annotations

import re

import pytest

from privtune.tracking.view import experiment_url
from tests.browser.conftest import Browser
from tests.tracked import Tracked
from tests.tracking.servers import Server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def run_url(base: str, experiment_id: str, run_id: str, artifact: str = "") -> str:
    """Return the address of an arm's run in MLflow's UI, or of one of its artifacts."""
    url = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    url += f"/artifacts/{artifact}" if artifact else ""
    return f"{url}?workflowType=machine_learning"


def address(ui: Server) -> str:
    """The link that ``privtune ui`` printed."""
    found = re.search(r"MLflow: (\S+)", ui.log.read_text())
    assert found is not None
    return found[1]


def test_the_printed_link_opens_the_saved_view(
    browser: Browser, ui: Server, tracked: Tracked
) -> None:
    link = address(ui)
    assert link == experiment_url(ui.url, tracked.experiment.experiment_id)
    browser.size(1440, 900)
    browser.open(link).wait_for("Privacy budget toy", "defaults", "selection", "hyfree")
    drawn = "return document.querySelectorAll('.js-plotly-plot .main-svg').length"
    browser.wait(lambda: browser.run(drawn) >= 3 * 3, "utility, ε and cost")
    browser.size(2200, 900)
    browser.open(experiment_url(ui.url, tracked.experiment.experiment_id, charts=False))
    browser.wait_for("acc/test", "eps/total", "eps/one_run", "eps/left", "cost/wall_seconds")
    text = browser.text
    assert "Sort: acc/test" in text
    assert "3 matching runs" in text
    assert "does not exist" not in text
    for run in tracked.runs.values():
        assert f"{run.data.metrics['eps/total']:g}" in text
    best = sorted(tracked.runs.values(), key=lambda r: -r.data.metrics["acc/test"])
    places = [text.index(f"\n{run.info.run_name}\n") for run in (best[0], best[-1])]
    assert places == sorted(places), "arms are sorted by accuracy"


def test_an_arm_s_page_shows_its_note_and_artifacts(
    browser: Browser, ui: Server, tracked: Tracked
) -> None:
    run = tracked.runs["selection"]
    page = run_url(ui.url, tracked.experiment.experiment_id, run.info.run_id)
    browser.size(1600, 1200)
    browser.open(page).wait_for("Privacy budget toy", "selection", "learning_rate", "tests.toy")
    page = run_url(ui.url, tracked.experiment.experiment_id, run.info.run_id, "privacy/ledger.json")
    browser.open(page).wait_for("ε alone", "toy-2", "best of K")
    page = run_url(ui.url, tracked.experiment.experiment_id, run.info.run_id, "privacy/report.html")
    browser.open(page).wait_for("report.html")
    frame = browser.wait(
        lambda: browser.run("const f=document.querySelector('iframe');return f&&(f.srcdoc||f.src)"),
        "the report",
    )
    if "srcdoc" in frame or frame.startswith("<"):
        assert "Charges of the budget" in frame
