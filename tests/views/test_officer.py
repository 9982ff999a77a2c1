"""What officers and registries are handed: valid, honest, and no number but the certificate's."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from privtune.accounting import Gaussian, epsilon, event_from_dict
from privtune.errors import PrivTuneError
from privtune.ledger import Budget, ChargeRequest, Ledger, verify_certificate
from privtune.numbers import show_epsilon
from privtune.study import Study
from privtune.views.officer import OPEN, SCHEMA, to_html, to_markdown, to_yaml
from tests.cli.conftest import Cli, cli
from tests.study.conftest import toy_spec
from tests.toy import curated
from tests.tracked import ARMS, Tracked
from tests.tracking.test_sealed import forms
from tests.views.registry_schema import FIELDS, REQUIRED, SHA256, problems, transcribed
from tests.views.test_report import Page

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def exported(tracked: Tracked) -> dict[str, str]:
    study = tracked.study
    return {"yaml": to_yaml(study), "markdown": to_markdown(study), "html": to_html(study)}


def test_the_entry_is_valid(exported: dict[str, str]) -> None:
    entry = yaml.safe_load(exported["yaml"])
    assert list(problems(entry)) == []
    shown = Path(__file__).parents[2] / "docs/examples/digits-demo-registry.yaml"
    assert list(problems(yaml.safe_load(shown.read_text("utf-8")))) == []
    # As the registry's own checks have it: no folded texts.
    styles = {token.style for token in yaml.scan(exported["yaml"]) if hasattr(token, "style")}
    assert styles <= {None, "|", "'", '"'}


def test_the_rules_find_what_is_wrong(exported: dict[str, str]) -> None:
    entry = yaml.safe_load(exported["yaml"])
    for path, value in (
        (("status",), "Done"),
        (("tier",), True),
        (("surprise",), "x"),
        (("deployment", "basic", "publication_date"), "1/1/2026"),
        (("deployment", "basic", "data_curators"), []),
        (("deployment", "privacy_loss", "privacy_parameters", "epsilon"), "6"),
        (("deployment", "accounting"), "x"),
    ):
        wrong = copy.deepcopy(entry)
        place: Any = wrong
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        assert len(list(problems(wrong))) == 1
    del entry["deployment"]["basic"]["name"]
    assert list(problems(entry)) == ["deployment/basic: lacks name"]


def test_the_rules_are_the_published_schema_s() -> None:
    path = os.environ.get("PRIVTUNE_REGISTRY_SCHEMA")
    if path is None:
        pytest.skip(f"PRIVTUNE_REGISTRY_SCHEMA names no copy of {SCHEMA}")
    content = Path(path).read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256
    assert transcribed(yaml.safe_load(content)) == (FIELDS, REQUIRED)


@pytest.mark.parametrize("form", ["yaml", "markdown", "html"])
def test_every_epsilon_follows_from_the_certificate(
    tracked: Tracked, exported: dict[str, str], form: str
) -> None:
    certificate = json.loads(json.dumps(tracked.study.certificate()))
    guarantee = verify_certificate(certificate).guarantee
    known = {show_epsilon(guarantee.epsilon, 4), f"{certificate['budget']['terms']['epsilon']:g}"}
    for charge in certificate["charges"]:
        alone = epsilon(event_from_dict(charge["event"]), 1e-5, adjacency=guarantee.adjacency)
        known.add(show_epsilon(alone.epsilon, 4))
    said = set(re.findall(r"ε = ([0-9]+(?:\.[0-9]+)?|∞)", exported[form]))
    assert said == known
    # The budget, what is spent, and arms, all of which may cost the same to four digits.
    assert len(known) >= 3
    assert len(certificate["charges"]) >= 3


def test_tuning_is_said_to_be_accounted_for(exported: dict[str, str]) -> None:
    entry = yaml.safe_load(exported["yaml"])["deployment"]["implementation"]
    tuning = entry["preprocessing_and_hyperparameter_tuning"]
    assert tuning.startswith("- Hyperparameter tuning: accounted for.")
    assert "defaults (fixed): its hyperparameters were fixed in advance. Charge toy-1" in tuning
    assert "selection (papernot-steinke): chooses among trials by noised scores." in tuning
    assert "best of K ~ geometric(mean 8, at least 2)" in tuning
    assert "hyfree (hyfreedp): adapts its hyperparameters within one training" in tuning
    assert OPEN in tuning


def test_what_no_tool_can_know_is_left_open(exported: dict[str, str]) -> None:
    for word in ("collected", "side channels", "unit of privacy", "access to the records"):
        (part,) = [p for p in exported["markdown"].split("### ") if word in p.split("\n")[0]]
        assert OPEN in part
    assert "No guarantee against" not in exported["markdown"]
    for text in exported.values():
        assert "ixed seed" in text  # the study's seed is known: that is loud everywhere


def test_markdown_and_page_say_the_same(exported: dict[str, str]) -> None:
    page = Page(exported["html"])
    assert not page.open
    assert page.loads == ["data:,"]
    plain = re.sub(r"\\(.)", r"\1", exported["markdown"]).replace("**", "")
    for line in plain.splitlines():
        words = line.lstrip("#->").strip()
        assert " ".join(words.split()) in page.text


def test_nothing_sealed_is_in_them(tracked: Tracked, exported: dict[str, str]) -> None:
    trials = curated(tracked.study).sealed_trials("selection")
    assert len(trials) >= 3
    for trial in trials:
        for value in (*trial["params"].values(), trial["score"]):
            for text in exported.values():
                assert not any(form in text.encode() for form in forms(value))


def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    odd = "<b>[x](y)|*z*\n# no"
    terms = {"name": "b", "epsilon": 6.0, "delta": 1e-5, "dataset": odd}
    with Ledger(storage) as ledger:
        ledger.create_budget(Budget(6.0, 1e-5, name="b", dataset=odd))
    study = Study.create(toy_spec(arms=ARMS[:1], budget=terms, epsilon=1.0), storage)
    study.run()
    assert "<b>" not in to_html(study)
    assert r"\<b\>\[x\](y)\|\*z\* \# no" in to_markdown(study)
    assert list(problems(yaml.safe_load(to_yaml(study)))) == []


def test_the_command_line(tmp_path: Path, cli: Cli) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    with Ledger(storage) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="old", dataset="clinic"))
        ledger.reserve("old", [ChargeRequest(Gaussian(5.0), study="s", arm="a")])
    at = ("toy", "--storage", storage)
    budget = {"name": "old", "epsilon": 3.0, "delta": 1e-5, "dataset": "clinic"}
    study = Study.create(toy_spec(arms=ARMS[:1], budget=budget, epsilon=1.0), storage)
    for flag in ("--registry", "--sp800-226"):
        done = cli("study", "export", *at, flag)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert "released nothing yet" in done.err
    study.run()
    with Ledger(storage) as ledger:
        others = len(ledger.charges("old")) - 1
    done = cli("study", "export", *at, "--registry")
    assert done.code == 0, done.err
    entry = yaml.safe_load(done.out)
    assert list(problems(entry)) == []
    done = cli("study", "export", *at, "--sp800-226")
    assert done.out.startswith("# Evaluation after NIST SP 800-226: toy")
    assert done.out.count("Charged to the same budget:") == others
    page = tmp_path / "page.html"
    assert cli("study", "export", *at, "--sp800-226", "--html", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert cli("study", "export", *at, "--registry", "--sp800-226").code == 2
    assert cli("study", "export", *at, "--html", str(page)).code == 2


def test_what_has_no_guarantee_is_not_registered(tmp_path: Path) -> None:
    arms = [*ARMS[:1], {"name": "oracle", "strategy": "non-private-grid", "points": 1}]
    study = Study.create(toy_spec(arms=arms), f"sqlite:///{tmp_path / 'p.db'}")
    study.run(non_private=True)
    with pytest.raises(PrivTuneError, match="oracle released something without any guarantee"):
        to_yaml(study)
    assert "**What these arms released has no privacy guarantee: oracle.**" in to_markdown(study)
