"""Runs ``docs/examples/nine.yaml`` and takes README's pictures: ``python -m tests.browser.pictures``."""

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
            ("study", "run", str(ROOT / "docs/examples/nine.yaml")),
            ("study", "compare", "nine", "--html", str(report)),
        ):
            subprocess.run([*command, *words], cwd=ROOT, check=True)
        command += ["ui", "--no-browser", "--study", "nine", "--port", str(port)]
        server = Server(command, port=port, log=folder / "ui.log", cwd=ROOT).start()
        try:
            take(Browser(driver), server, report)
        finally:
            server.stop()
            driver.quit()


def take(browser: Browser, server: Server, report: Path) -> None:
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
    browser.screenshot(ROOT / "docs/demo.png")
    browser.size(1100, 700)
    browser.open(report.as_uri())
    browser.wait(lambda: browser.run(DRAWN) >= 3, "the comparison")
    browser.screenshot(ROOT / "docs/report.png")


DRAWN = "return document.querySelectorAll('.js-plotly-plot .main-svg').length"

if __name__ == "__main__":
    main()
