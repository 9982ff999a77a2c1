"""Audits that are kept: the certificate carries them, and cannot be told another story by them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.audit import audit
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    render_certificate,
    verify_certificate,
)
from privtune.ledger.audits import AUDITS, check_audit, contradictions
from privtune.ledger.chain import digest_of
from privtune.ledger.schema import blobs
from privtune.study import Study, audits_of, keep_audit
from privtune.training.mechanism import oracle
from privtune.views.officer import to_markdown
from privtune.views.report import render_study
from tests.cli.conftest import Cli, cli
from tests.study.conftest import toy_spec
from tests.tracked import ARMS

__all__ = ["cli"]


def audited(study: Study, **options: Any) -> dict[str, Any]:
    budget = study.spec.budget
    report = audit(
        study.plans[0], delta=budget.delta, published=budget.epsilon, runs=100, **options
    )
    return report.to_dict()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("audited")
    study = Study.create(toy_spec(arms=ARMS[:1], seed=1), f"sqlite:///{folder / 'p.db'}")
    keep_audit(study, audited(study))
    study.run()
    return study


@pytest.fixture
def certificate(ran: Study) -> dict[str, Any]:
    return ran.certificate()


def forged(certificate: dict[str, Any]) -> dict[str, Any]:
    """Give an edited certificate the digest of what it says now."""
    rest = {key: value for key, value in certificate.items() if key != "digest"}
    return {**rest, "digest": digest_of(rest)}


def test_a_certificate_carries_what_was_kept_and_verifies(certificate: dict[str, Any]) -> None:
    [record] = certificate["audits"]
    assert record["passed"]
    [warning] = verify_certificate(json.loads(json.dumps(certificate))).warnings
    assert (
        warning
        == "Charge toy-1, as the study noted: fixed seed: no guarantee against whoever knows it."
    )
    assert "<h2>Audits</h2>" in render_certificate(certificate)


def test_an_audit_that_is_left_out_of_a_certificate_is_missed(
    certificate: dict[str, Any], ran: Study
) -> None:
    [noted] = [entry for entry in certificate["entries"] if entry["kind"] == "audited"]
    assert noted["body"] == {
        "study": ran.name,
        "arm": ran.plans[0].arm,
        "plan": certificate["audits"][0]["plan"],
        "passed": True,
        "digest": noted["body"]["digest"],
    }
    for less in ({}, {"audits": []}, {"audits": [{**certificate["audits"][0], "seed": 7}]}):
        rest = {key: value for key, value in certificate.items() if key != "audits"}
        with pytest.raises(LedgerCorruptedError, match="is missing, or was edited"):
            verify_certificate(forged({**rest, **less}))


def test_an_audit_that_is_removed_from_the_ledger_is_missed(tmp_path: Path) -> None:
    study = Study.create(toy_spec(arms=ARMS[:1], seed=1), f"sqlite:///{tmp_path / 'p.db'}")
    report = audited(study)
    for _ in range(2):  # noted once
        keep_audit(study, report)
    study.run()
    kinds = [entry["kind"] for entry in study.certificate()["entries"]]
    assert kinds.count("audited") == 1
    with Ledger(study.storage) as ledger, ledger.log.storage.write() as connection:
        connection.execute(sa.delete(blobs).where(blobs.c.name.startswith(AUDITS)))
    with pytest.raises(LedgerCorruptedError, match="is missing"):
        study.certificate()
    study.close()


def test_an_audit_that_goes_with_its_study_is_not_forgotten(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    study = Study.create(toy_spec(arms=ARMS[:1], seed=1), storage)
    report = audited(study)
    keep_audit(study, report)
    study.run()
    study.delete()
    study.close()
    with Ledger(storage) as ledger:
        certificate = export_certificate(ledger.log.storage, "toy")
    assert "audits" not in certificate
    [said] = [w for w in verify_certificate(certificate).warnings if "audit" in w]
    assert "agreed with the reported ε. It was deleted" in said


OF_ANOTHER = {
    "mechanism": "one training",
    "event": Gaussian(1.0).to_dict(),
    "audited": 1.0,
    "lower": 4.37,
    "reported": 4.4,
    "runs": 100,
    "passed": True,
}


def edit(key: str, value: Any) -> Any:
    def change(record: dict[str, Any]) -> None:
        record["rows"][0][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (edit("reported", 0.5), "costs between"),
        (edit("lower", 30.0), "costs between"),
        (edit("audited", 50.0), "do not fit together"),
        (lambda record: record.update(plan="0" * 64), "no charge"),
        (lambda record: record.update(study="another"), "no charge"),
        (lambda record: record.update(delta=1e-3), "another δ"),
        (lambda record: record.update(published=1.0), "another δ"),
        (lambda record: record.update(passed=False), "do not fit together"),
        (lambda record: record.pop("rows"), "lack a part"),
        (lambda record: record.pop("seed"), "lack a part"),
        (lambda record: record.update(confidence="all"), "no number"),
        (edit("runs", "many"), "no number"),
        (lambda record: record["rows"][0].update(event="none"), "lack a part|event"),
        (lambda record: record["rows"].append(OF_ANOTHER), "no part of what was charged"),
        (lambda record: record["checks"].pop(), "is missing, or was edited"),
    ],
)
def test_an_audit_that_misquotes_the_account_does_not_verify(
    certificate: dict[str, Any], change: Any, why: str
) -> None:
    edited = copy.deepcopy(certificate)
    change(edited["audits"][0])
    with pytest.raises(LedgerCorruptedError, match="digest"):
        verify_certificate(edited)
    with pytest.raises((LedgerCorruptedError, InvalidInputError), match=why):
        verify_certificate(forged(edited))


def test_what_was_found_is_held_against_the_account_of_today(
    certificate: dict[str, Any], ran: Study
) -> None:
    """A record that says that much more was reported then does not excuse what was found."""
    [record] = certificate["audits"]
    record["rows"][0].update(audited=50.0, reported=1000.0)
    [warning] = contradictions([check_audit(record, ran.spec.budget.to_budget())])
    assert "contradicts the reported ε of one training: it is above 50" in warning


def test_the_report_and_the_officer_s_page_show_the_chain(ran: Study) -> None:
    page = render_study(ran)
    assert all(word in page for word in ("<h2>Audits</h2>", "audited ≤", "audits-data"))
    assert "by experiment on made-up records ε ≥" in to_markdown(ran)


def test_what_contradicts_is_kept_and_said_everywhere(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    study = Study.create(toy_spec(arms=ARMS[:1], seed=1), storage)
    study.run()
    keep_audit(study, audited(study))
    real = oracle.noise_scale
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "noise_scale", lambda *args: real(*args) / 4.0)
        keep_audit(study, audited(study, seed=1))
    assert [record["passed"] for record in audits_of(study)].count(False) == 1
    certificate = study.certificate()
    warnings = verify_certificate(certificate).warnings
    assert any("contradicts the reported ε of one training" in said for said in warnings)
    for page in (render_certificate(certificate), render_study(study), to_markdown(study)):
        assert "contradicts the reported ε of one training" in page
    file = tmp_path / "c.json"
    done = cli(
        "budget", "export", study.spec.budget.name, "--storage", storage, "--output", str(file)
    )
    assert done.code == 0, done.err
    assert "contradicts" in cli("budget", "verify", "--certificate", str(file)).out


def test_an_audit_of_something_else_is_not_kept(ran: Study) -> None:
    report = audited(ran)
    for other in ({"arm": "nobody"}, {"plan": "0" * 64}, {"delta": 1e-3}, {"published": None}):
        with pytest.raises(InvalidInputError, match="audit"):
            keep_audit(ran, {**report, **other})
    for wrong in ({"audited": float("nan")}, {"reported": 0.1}, {"runs": "many"}):
        rows = [{**report["rows"][0], **wrong}]
        with pytest.raises(InvalidInputError, match="is no report"):
            keep_audit(ran, {**report, "rows": rows})
    with pytest.raises(InvalidInputError, match="audit"):
        keep_audit(ran, {})
    assert len(audits_of(ran)) == 1


def test_an_audit_of_what_was_not_charged_is_in_no_certificate(tmp_path: Path) -> None:
    study = Study.create(toy_spec(arms=ARMS[:2]), f"sqlite:///{tmp_path / 'p.db'}")
    keep_audit(study, audited(study))
    assert "audits" not in study.certificate()
