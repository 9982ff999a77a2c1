"""What a study's folder and its memory hold once arms are released: the certificate, and no secret."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing

import pytest

import privtune
from privtune.accounting import Gaussian
from privtune.files import midnight
from privtune.ledger import ChargeRequest, Ledger, verify_certificate
from privtune.strategies import Fixed
from privtune.study import Study
from privtune.study.lifecycle import Life
from tests.study import driven
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, TERMS, simple

MANY = [
    {
        "name": f"arm-{n:02d}",
        "strategy": "fixed",
        "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
    }
    for n in range(24)
]
BUDGET = {"name": "toy", "epsilon": 40.0, "delta": 1e-5}


def certified_states(study: Study) -> list[str]:
    """Return the states of charges by the certificate in a study's folder."""
    certificate = json.loads((study.folder / "certificate.json").read_text())
    verify_certificate(certificate)
    return [charge["state"] for charge in certificate["charges"]]


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that grows with each call of a method of studies' lives."""
    calls: list[str] = []
    method: Callable[..., None] = getattr(Life, name)

    def counting(self: Life, *arguments: object) -> None:
        calls.append(name)
        method(self, *arguments)

    monkeypatch.setattr(Life, name, counting)
    return calls


def test_many_releases_share_a_certificate_that_is_complete_at_the_end(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = counted(monkeypatch, "write_certificate")
    with closing(Study.create(toy_spec(arms=MANY, epochs=1, budget=BUDGET), storage)) as study:
        study.run()
        # With each of the first ten, then with each tenth, and at the end.
        assert len(written) == 10 + 2 + 1
        assert certified_states(study) == ["settled"] * len(MANY)
        times = {path.stat().st_mtime for path in (study.folder, study.folder / "certificate.json")}
        assert times == {midnight()}


def test_a_run_that_was_stopped_before_its_last_note_writes_the_certificate(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study.create(toy_spec(arms=MANY[:2], epochs=1, budget=BUDGET), storage)
    note = Life.set_announced

    def stopping(self: Life, arm: str) -> None:
        if arm == MANY[1]["name"]:
            (study.folder / "certificate.json").unlink()  # as if the process had ended before it
            raise KeyboardInterrupt
        note(self, arm)

    with monkeypatch.context() as patched:
        patched.setattr(Life, "set_announced", stopping)
        with pytest.raises(KeyboardInterrupt):
            study.run()
    study.close()
    with closing(Study("toy", storage)) as study:
        assert not study.finished
        study.run()
        assert certified_states(study) == ["settled"] * 2


def add_arm(study: Study, name: str) -> None:
    """Run one more arm of an open study."""
    task = privtune.make_task(simple, **OWN)
    study.optimize(task, strategy=Fixed(), epsilon=0.5, arm=name, **TERMS)


def test_each_arm_of_an_open_study_brings_the_certificate_up_to_date(storage: str) -> None:
    with closing(privtune.create_study("open", budget=driven.OPEN, storage=storage)) as study:
        for number in range(12):
            add_arm(study, f"arm-{number}")
            assert certified_states(study) == ["settled"] * (number + 1)


def test_a_certificate_that_another_process_overtook_is_written_again(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Life.certificate
    others = iter([True])

    def overtaken(self: Life) -> dict[str, object]:
        document = certificate(self)
        if next(others, False):
            with Ledger(storage) as ledger:
                (charge,) = ledger.reserve("open", [ChargeRequest(Gaussian(90.0))])
                ledger.void(charge.id)
        return document

    monkeypatch.setattr(Life, "certificate", overtaken)
    with closing(privtune.create_study("open", budget=driven.OPEN, storage=storage)) as study:
        add_arm(study, "arm")
        assert certified_states(study) == ["settled", "voided"]


def test_no_secret_of_an_arm_is_kept_by_whoever_reads_it(storage: str) -> None:
    with closing(Study.create(toy_spec(), storage)) as study:
        study.status()
        life = study._life
        secrets = [life.secret(plan) for plan in study.plans]
        assert all(len(secret) == 32 for secret in secrets)
        kept = repr(life._arms)
        assert "arm" in kept
        for secret in secrets:
            assert secret.hex() not in kept
            assert repr(secret) not in kept


def test_whoever_changes_a_release_changes_it_for_nobody_else(storage: str) -> None:
    with closing(Study.create(toy_spec(), storage)) as study:
        study.run()
        study.release("defaults").machine["torch"] = "another"
        assert study.release("defaults").machine["torch"] != "another"
