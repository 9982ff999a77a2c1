"""MLflow's UI as a team sees it: the format of its saved views is held against the real page."""

from __future__ import annotations

from pathlib import Path

import pytest

from privtune.plots.style import looks
from privtune.tracking.guard import add_key, write_door
from privtune.tracking.view import experiment_url
from tests.browser.conftest import Browser
from tests.tracked import Tracked
from tests.tracking.servers import Server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


CARDS = """
return [...document.querySelectorAll('[data-testid="experiment-view-compare-runs-card"]')]
.map(card => [card, card.querySelector('h4'), card.querySelector('.js-plotly-plot')])
.filter(([card, title, plot]) => plot && plot._fullLayout)
.map(([card, title, plot]) => ({
    title: title.innerText, whole: title.scrollWidth <= title.clientWidth,
    top: card.getBoundingClientRect().top, width: card.getBoundingClientRect().width,
    x: plot.data[0].x, colours: plot.data[0].marker.color, low: plot._fullLayout.xaxis.range[0]}))
"""
"""Title, place, values and colours of every chart that is drawn."""


def run_url(base: str, experiment_id: str, run_id: str, artifact: str = "") -> str:
    """Return the address of an arm's run in MLflow's UI, or of one of its artifacts."""
    url = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    url += f"/artifacts/{artifact}" if artifact else ""
    return f"{url}?workflowType=machine_learning"


def test_the_printed_link_opens_the_saved_view(
    browser: Browser, ui: Server, tracked: Tracked
) -> None:
    page = experiment_url(ui.url, tracked.experiment.experiment_id)
    assert ui.address == add_key(page, ui.key)
    browser.size(1440, 900)
    browser.open(ui.address).wait_for("Privacy budget toy", "defaults", "selection", "hyfree")
    assert "key=" not in browser.run("return location.href")
    # As MLflow opens first: its assistant, which no setting of MLflow's closes, takes a quarter.
    browser.wait_for("MLflow Assistant")
    browser.wait(lambda: len(browser.run(CARDS)) >= 2, "the result and the cost")
    first, second = browser.run(CARDS)[:2]
    assert (first["title"], second["title"]) == ("acc/test", "eps/arm")
    assert [first["whole"], second["whole"]] == [True, True], "no title is cut"
    assert first["top"] == second["top"], "two in a row"
    assert first["width"] > 200
    results = {name: run.data.metrics["acc/test"] for name, run in tracked.runs.items()}
    assert first["x"] == sorted(results.values()), "the best stands above, as in the list"
    colours = looks([plan.arm for plan in tracked.study.plans])
    arms = {look.colour: arm for arm, look in colours.items()}
    for card in (first, second):
        assert card["low"] == 0
        drawn = {arms[c]: value for c, value in zip(card["colours"], card["x"], strict=True)}
        known = {arm: run.data.metrics[card["title"]] for arm, run in tracked.runs.items()}
        assert drawn == known, "every bar has the colour of its arm"
    browser.size(2800, 900)
    browser.open(experiment_url(ui.url, tracked.experiment.experiment_id, charts=False))
    browser.wait_for("acc/test", "eps/arm", "eps/one_run", "eps/left", "cost/cpu_seconds")
    text = browser.text
    assert "Sort: acc/test" in text
    assert "3 matching runs" in text
    assert "does not exist" not in text
    for run in tracked.runs.values():
        assert f"{run.data.metrics['eps/arm']:g}" in text
    best = sorted(tracked.runs.values(), key=lambda r: -r.data.metrics["acc/test"])
    places = [text.index(f"\n{run.info.run_name}\n") for run in (best[0], best[-1])]
    assert places == sorted(places), "arms are sorted by accuracy"


def test_the_page_that_a_browser_is_started_with_opens_mlflow(
    browser: Browser, ui: Server, tmp_path: Path
) -> None:
    browser.driver.delete_all_cookies()
    browser.open(write_door(tmp_path, ui.address).as_uri())
    browser.wait_for("Privacy budget toy", "selection")
    assert "key=" not in browser.run("return location.href")
    assert browser.run("return document.cookie") == ""


def test_an_arm_s_page_shows_its_note_and_artifacts(
    browser: Browser, ui: Server, tracked: Tracked
) -> None:
    run = tracked.runs["selection"]
    page = run_url(ui.url, tracked.experiment.experiment_id, run.info.run_id)
    browser.size(1600, 1200)
    browser.open(page).wait_for("Privacy budget toy", "selection", "learning_rate", "blobs")
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
