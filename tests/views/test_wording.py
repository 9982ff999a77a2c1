"""What is promised, by unit: the same words on every page, and of records nothing that only persons are."""

from __future__ import annotations

import html
import math
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import privtune
from privtune.accounting import Adjacency, Gaussian, epsilon
from privtune.ledger.certificate_page import render_certificate
from privtune.ledger.wording import PromiseWording
from privtune.strategies import Fixed
from privtune.study.declared_arms import DeclaredTrial, Mechanism
from privtune.views.officer import to_html, to_markdown, to_yaml
from privtune.views.record import arm_record, budget_view, study_note
from privtune.views.report import render_study
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

PERSONS = re.compile(
    r"\b(persons?|people|patients?|individuals?|humans?|customers?|employees?)\b", re.I
)


def objective(trial: DeclaredTrial) -> object:
    trial.suggest_float("rate", 0.1, 1.0)
    return trial.result({"w": trial.plan.noise_multiplier * np.random.normal(size=2)})


def documents(unit: str, url: str) -> dict[str, str]:
    """Return every document of a study whose budget protects a unit."""
    budget = privtune.Budget(3.0, 1e-5, name="b", unit=unit, dataset="the register")
    with closing(privtune.create_study("s", budget=budget, storage=url)) as study:
        mechanism = Mechanism(Gaussian(1.0), "the lab", records=100)
        release = study.optimize_declared(
            objective, mechanism=mechanism, strategy=Fixed(parameters={"rate": 0.5})
        )
        view = budget_view(study)
        return {
            "report": render_study(study),
            "page": to_html(study),
            "questionnaire": to_markdown(study),
            "registry": to_yaml(study),
            "certificate": render_certificate(study.certificate()),
            "note of the study": study_note(study, view, study.status()),
            "note of the arm": str(arm_record(study, study.plans[0], release, view).note),
        }


def text_of(document: str) -> str:
    """Return what somebody reads of a page: no markup, styles or scripts, one blank between words."""
    bare = re.sub(r"<(script|style).*?</\1>", "", document, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


@pytest.fixture(scope="module", params=["record", "patient"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    url = f"sqlite:///{tmp_path_factory.mktemp(request.param) / 'p.db'}"
    pages = documents(request.param, url)
    return request.param, {name: text_of(page) for name, page in pages.items()}


def test_documents_speak_of_their_unit_alone(written: tuple[str, dict[str, str]]) -> None:
    unit, pages = written
    for name, page in pages.items():
        words = set(map(str.lower, PERSONS.findall(page)))
        allowed = set() if unit == "record" else {unit}
        assert words <= allowed, f"{name} of unit {unit} speaks of {words - allowed}"


def test_the_caveat_stands_where_somebody_signs_or_decides(
    written: tuple[str, dict[str, str]],
) -> None:
    unit, pages = written
    wording = PromiseWording(unit)
    for name in ("report", "certificate", "note of the study"):
        assert wording.caveat in pages[name], name
    for name in ("page", "questionnaire", "registry"):
        assert wording.caveat.split(".")[0] in pages[name], name
    assert wording.short_caveat in pages["note of the arm"]
    assert f"one {unit}" in wording.caveat
    assert f"One {unit} makes no outcome" in pages["report"]
    assert f"sure that a certain {unit} is in the data" in pages["questionnaire"]


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_commands_speak_of_the_unit_alone(unit: str, tmp_path: Path, cli: Cli) -> None:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    documents(unit, url)
    allowed = set() if unit == "record" else {unit}
    for command in (("study", "compare", "s"), ("study", "show", "s"), ("budget", "show", "b")):
        done = cli(*command, "--storage", url)
        assert done.code == 0, done.err
        assert set(map(str.lower, PERSONS.findall(done.out))) <= allowed
    shown = " ".join(cli("study", "compare", "s", "--storage", url).out.split())
    assert PromiseWording(unit).short_caveat in shown


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("unit", ["record", "hospital"])
def test_every_sentence_names_the_unit(unit: str, adjacency: Adjacency) -> None:
    wording = PromiseWording(unit)
    sentences = [
        wording.define_neighbours(adjacency),
        wording.explain_epsilon(1.0, 1e-5),
        wording.caveat,
        wording.short_caveat,
    ]
    assert all(unit in sentence for sentence in sentences)
    assert not any(PERSONS.search(sentence) for sentence in sentences)
    assert "is protected less: by up to k times ε, at δ times" in wording.caveat


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_the_factors_of_group_privacy_hold(noise: float, copies: int) -> None:
    """One Gaussian release: k records move it k times as far, as under noise smaller by k."""
    small = 1e-6
    one = epsilon(Gaussian(noise), small).epsilon
    several = copies * one
    stated = small * math.expm1(copies * one) / math.expm1(one)
    if stated < 1.0:
        assert epsilon(Gaussian(noise / copies), stated).epsilon <= several
    assert "(e^(kε) − 1)/(e^ε − 1)" in PromiseWording("record").caveat
