"""The budget commands, as a data-protection officer types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.ledger import Budget, BudgetExceededError, ChargeRequest, Ledger
from tests.cli.conftest import Cli

TRAINING = {
    "type": "repeated",
    "count": 2340,
    "event": {
        "type": "poisson_sampled",
        "rate": 0.0043,
        "event": {"type": "gaussian", "noise_multiplier": 1.08},
    },
}
SELECTION = {
    "type": "private_selection",
    "event": TRAINING,
    "runs": {"law": "geometric", "mean": 10},
}


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    monkeypatch.setenv("PRIVTUNE_STORAGE", url)
    return url


@pytest.fixture
def event(tmp_path: Path) -> str:
    path = tmp_path / "event.json"
    path.write_text(json.dumps(TRAINING))
    return str(path)


@pytest.fixture
def selection(tmp_path: Path) -> str:
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(SELECTION))
    return str(path)


@pytest.fixture
def budget(cli: Cli, url: str) -> str:
    done = cli(
        "budget", "create", "b", "--epsilon", "2", "--delta", "1e-5", "--dataset", "[clinic]"
    )
    assert done.code == 0, done.err
    return "b"


def document(cli: Cli, *args: str) -> dict:
    done = cli(*args, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_unit_is_stored_shown_and_asked_of_charges(cli: Cli, url: str, event: str) -> None:
    terms = ("--epsilon", "2", "--delta", "1e-5")
    assert cli("budget", "create", "w", *terms, "--unit", "two, three").code == 1
    done = cli("budget", "create", "b", *terms, "--unit", "person")
    assert "add-remove of one person" in done.out
    assert "add-remove, one person" in cli("budget", "show", "b").out
    refused = cli("budget", "charge", "b", event, "--note", "a table")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert (
        "The event counts each record by itself, but budget 'b' protects every person"
        in refused.err
    )
    assert cli("budget", "charge", "b", event, "--note", "a table", "--unit", "person").code == 0
    assert [one["unit"] for one in document(cli, "budget", "charges", "b")] == ["person"]


def test_list_and_show(cli: Cli, budget: str, event: str) -> None:
    assert document(cli, "budget", "list")[0]["name"] == "b"
    shown = document(cli, "budget", "show", "b")
    assert shown["spent"]["epsilon"] == 0
    assert shown["remaining"] == 2.0
    assert not shown["filter"]["in_force"]
    assert "not in force" in cli("budget", "show", "b").out
    cli("budget", "charge", "b", event, "--note", "x")
    text = cli("budget", "show", "b").out
    for word in ("odometer", "filter", "[clinic]", "chain head", "1 started"):
        assert word in text
    assert "[clinic]" in cli("budget", "list").out


def test_charge_refuse_and_say_what_fits(cli: Cli, budget: str, event: str, selection: str) -> None:
    charged = document(cli, "budget", "charge", "b", event, "--note", "first")
    assert (charged["id"], charged["state"], charged["basis"]) == ("b-1", "started", "declared")
    done = cli("budget", "charge", "b", selection, "--note", "second")
    assert (done.code, done.out) == (1, "")
    assert "asks for ε = 1.445 on its own" in done.err
    assert "a DP-SGD training with q = 0.0043, T = 2340 from σ ≥ " in done.err
    assert "a selection of mean 10 over it from σ ≥ " in done.err
    assert len(document(cli, "budget", "charges", "b")) == 1


def test_what_is_said_to_fit_fits(
    cli: Cli, budget: str, event: str, selection: str, tmp_path: Path
) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    refusal = cli("budget", "charge", "b", selection, "--note", "second").err
    sigmas = [float(part.split()[0].strip(";.")) for part in refusal.split("σ ≥ ")[1:]]
    for sigma, base in zip(sigmas, (TRAINING, SELECTION), strict=True):
        for factor, code in ((0.97, 1), (1.0, 0)):
            path = tmp_path / "again.json"
            path.write_text(json.dumps(base).replace("1.08", str(sigma * factor)))
            storage = f"sqlite:///{tmp_path}/{sigma}-{factor}.db"
            cli("budget", "create", "b", "--epsilon", "2", "--delta", "1e-5", "--storage", storage)
            cli("budget", "charge", "b", event, "--note", "first", "--storage", storage)
            done = cli("budget", "charge", "b", str(path), "--note", "x", "--storage", storage)
            assert done.code == code, done.err


def test_a_broken_budget_is_not_sound(cli: Cli, budget: str, tmp_path: Path) -> None:
    """Neither is its certificate, nor the page: all say so, loudly, and with exit 1."""
    path = tmp_path / "loud.json"
    path.write_text('{"type": "gaussian", "noise_multiplier": 0.9}')
    cli("budget", "charge", "b", str(path), "--note", "leak", "--already-released")
    certificate, page = tmp_path / "c.json", tmp_path / "c.html"
    assert cli("budget", "export", "b", "--output", str(certificate), "--html", str(page)).code == 0
    for args in (("b",), ("--certificate", str(certificate))):
        done = cli("budget", "verify", *args)
        assert done.code == 1
        assert "THE BUDGET IS BROKEN: everything charged to 'b' costs ε = 4.9474 of 2." in done.err
        assert done.err.count("\n") == 1
        assert "sound" not in done.out
    found = json.loads(cli("budget", "verify", "b", "--json").out)
    assert (found["valid"], found["within_budget"]) == (True, False)
    assert "b-1" in found["warnings"][1]
    assert json.loads(certificate.read_text())["within_budget"] is False
    assert "This budget is broken" in page.read_text()


def test_backup(cli: Cli, budget: str, event: str, tmp_path: Path) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    file = tmp_path / "copy.db"
    assert document(cli, "budget", "backup", str(file)) == {"file": str(file), "budgets": ["b"]}
    log = document(cli, "budget", "verify", "b")
    assert document(cli, "budget", "verify", "b", "--storage", f"sqlite:///{file}") == log
    done = cli("budget", "backup", str(file))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "sealed" in cli("budget", "backup", str(tmp_path / "other.db")).out


def test_void_gives_back(cli: Cli, budget: str, url: str) -> None:
    with Ledger(url) as ledger:
        ledger.reserve("b", [ChargeRequest(Gaussian(9.0), note="[bold]")])
    assert "[bold]" in cli("budget", "charges", "b").out
    assert document(cli, "budget", "void", "b-1")["state"] == "voided"
    done = cli("budget", "void", "b-1")
    assert (done.code, "is voided" in done.err) == (1, True)


def test_verify_export_and_verify_the_certificate(
    cli: Cli, budget: str, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli("budget", "charge", "b", event, "--note", "first")
    log = document(cli, "budget", "verify", "b")
    assert log["valid"] is True
    assert cli("budget", "export", "b", "--html", "b.html").code == 0
    file = document(cli, "budget", "verify", "--certificate", "b.certificate.json")
    assert file == log
    both = document(cli, "budget", "verify", "b", "--certificate", "b.certificate.json")
    assert both["head"] == document(cli, "budget", "export", "b")["head"] == log["head"]
    page = (tmp_path / "b.html").read_text()
    assert "Privacy certificate: b" in page
    assert log["head"] in page
    text = (tmp_path / "b.certificate.json").read_text()
    (tmp_path / "edited.json").write_text(text.replace("first", "worst"))
    done = cli("budget", "verify", "--certificate", "edited.json")
    assert (done.code, "entry 2" in done.err) == (1, True)
    assert cli("budget", "verify", "b", "--head", "0" * 64).code == 1
    assert cli("budget", "verify").code == 2


def test_close_is_for_good(cli: Cli, budget: str, event: str) -> None:
    assert document(cli, "budget", "close", "b") == {"name": "b", "closed": True}
    done = cli("budget", "charge", "b", event, "--note", "x")
    assert (done.code, "closed for good" in done.err) == (1, True)
    assert document(cli, "budget", "show", "b")["closed"] is True


def test_a_refusal_rounds_what_is_spent_up_and_what_is_left_down() -> None:
    refusal = BudgetExceededError(
        Budget(3.0, 1e-5), requested=2.00001, spent=1.00001, remaining=1.99999
    )
    assert "asks for ε = 2.001 on its own; ε = 1.001 is spent, ε = 1.999 is left" in str(refusal)
