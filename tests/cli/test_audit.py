"""``privtune audit``: its table, its JSON, its refusals; it touches no data and spends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from privtune.training.mechanism import oracle
from tests.cli.conftest import Cli
from tests.study.conftest import FIXED, toy_spec
from tests.toy import LOADS


@pytest.fixture
def study(cli: Cli, tmp_path: Path) -> tuple[str, ...]:
    path, storage = tmp_path / "toy.yaml", f"sqlite:///{tmp_path / 'p.db'}"
    path.write_text(yaml.safe_dump(toy_spec(arms=[FIXED]).model_dump(mode="json")))
    done = cli("study", "create", str(path), "--storage", storage, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["study"], "--storage", storage


def test_an_arm_is_audited_and_nothing_is_touched(cli: Cli, study: tuple[str, ...]) -> None:
    loads = len(LOADS)
    done = cli("audit", *study, "--arm", "defaults", "--runs", "100")
    assert done.code == 0, done.err
    for word in ("audited ≤", "published", "one training", "sampling rate", "holds", "composition"):
        assert word in done.out or word == "composition"
    assert "201 trainings" in done.out
    assert len(LOADS) == loads
    assert "BROKEN" not in done.out


def test_a_contradiction_is_exit_1(
    cli: Cli, study: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = oracle.noise_scale
    monkeypatch.setattr(oracle, "noise_scale", lambda *args: real(*args) / 4.0)
    done = cli("audit", *study, "--arm", "defaults", "--runs", "100", "--json")
    assert done.code == 1
    [report] = json.loads(done.out)
    assert not report["passed"]
    assert report["arm"] == "defaults"


def test_refusals_are_one_sentence(cli: Cli, study: tuple[str, ...]) -> None:
    for more in (["--arm", "nobody"], ["--model", "large"], ["--confidence", "2"]):
        done = cli("audit", *study, *more)
        assert done.code == 1
        assert "must" in done.err
        assert "Traceback" not in done.err
