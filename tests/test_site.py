"""The site builds strictly, from the repository alone, and shows what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import privtune
from privtune import sklearn
from privtune.strategies import STRATEGIES
from privtune.study import StudySpec
from privtune.study.planning import plan_study
from privtune.training.methods import METHODS

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def text(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text("utf-8")


def test_every_readme_and_page_is_a_page(site: Path) -> None:
    rooms = {path.parent.name for path in ROOT.glob("privtune/**/README.md")} - {
        "accounting",
        "ledger",
    }
    built = {path.parent.name.rpartition("-")[2] for path in site.glob("rooms/*/index.html")}
    assert rooms <= built
    assert (site / "accounting" / "index.html").exists()
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guide").glob("*.md")]:
        page = path.relative_to(ROOT / "docs").with_suffix("")
        assert (site / page / "index.html").exists(), path


def test_the_reference_names_all_that_is_public(site: Path) -> None:
    python = text(site, "reference/python")
    modules = {"accounting", "strategies"}
    for name in {*privtune.__all__, *sklearn.__all__} - modules:
        assert re.search(rf'id="privtune\.[\w.]*\b{name}"', python), name
    chosen = text(site, "reference/strategies")
    for name in (*STRATEGIES, *METHODS):
        assert f'id="{name}"' in chosen or f'id="{name}_1"' in chosen, name
    commands = text(site, "reference/cli")
    for name in ("study create", "study run", "budget verify", "account epsilon", "worker", "ui"):
        assert f"privtune {name}" in commands


@pytest.mark.parametrize("page", ["which", "studies", "studies/price_of_honesty"])
def test_the_charts_of_studies_are_shown(site: Path, page: str) -> None:
    charts = re.findall(r'<img[^>]*src="([^":]*\w+\.png)"', text(site, page))
    assert charts
    assert all((site / page / chart).resolve().exists() for chart in charts)


def test_the_spec_of_the_first_page_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/start.md").read_text("utf-8"), re.DOTALL
    )
    (tmp_path / "people.csv").write_text("age,visits,plan,left\n41,3,basic,no\n29,0,family,yes\n")
    monkeypatch.chdir(tmp_path)
    plans = plan_study(StudySpec.parse(yaml.safe_load(spec))).plans
    assert [plan.arm for plan in plans] == ["auto", "hyfree", "selection"]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Neither by pages nor by their styles: the site serves behind a hospital's firewall, too."""
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text()
        )
        assert not loaded, page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*['\"]?https?://", style.read_text()), style
