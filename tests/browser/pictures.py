"""Runs the demo and takes the documentation's pictures: ``python -m tests.browser.pictures``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.conftest import Browser, chromium
from tests.tracking.servers import Server, free_port

ROOT = Path(__file__).parents[2]


def main() -> None:
    driver = chromium()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        os.environ["PRIVTUNE_STORAGE"] = f"sqlite:///{folder / 'privtune.db'}"
        command = [sys.executable, "-m", "privtune"]
        report = folder / "report.html"
        for words in (
            ("demo", "--folder", str(folder)),
            ("study", "compare", "digits-demo", "--html", str(report)),
        ):
            subprocess.run([*command, *words], cwd=ROOT, check=True)
        command += ["ui", "--no-browser", "--study", "digits-demo", "--port", str(port)]
        server = Server(command, port=port, log=folder / "ui.log", cwd=ROOT).start()
        browser = Browser(driver)
        try:
            take_report(browser, report)
            take_mlflow(browser, server)
        finally:
            server.stop()
            driver.quit()


def take_report(browser: Browser, report: Path) -> None:
    """README's picture: from the report's title to the end of the chart with the intervals."""
    browser.size(1100, 1000)
    browser.open(report.as_uri())
    browser.wait(lambda: browser.run(DRAWN) >= 3, "the comparison")
    end = browser.run(
        "return document.querySelector('.js-plotly-plot').getBoundingClientRect().bottom"
    )
    browser.size(1100, round(end))
    browser.screenshot(ROOT / "docs/demo.png")


def take_mlflow(browser: Browser, server: Server) -> None:
    browser.size(1440, 900)
    browser.open(server.address)
    for name in (
        "[data-component-id='mlflow.assistant.chat_panel.close']",
        "[aria-label='Hide banner']",
    ):
        click = f'const found = document.querySelector("{name}"); found?.click(); return !!found'
        browser.wait(lambda script=click: browser.run(script), name)
    browser.wait(lambda: browser.run(DRAWN) >= 4 * 3, "four charts")
    time.sleep(2)  # MLflow draws them again in their new size
    browser.screenshot(ROOT / "docs/mlflow.png")


DRAWN = "return document.querySelectorAll('.js-plotly-plot .main-svg').length"

if __name__ == "__main__":
    main()
