"""The budget commands, as a data-protection officer types them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.cli._common import console
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
    "runs": {"law": "geometric", "mean": 10, "minimum": 2},
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
    assert "add-remove, one person" in cli("budget", "show", "b", "--no-fits").out
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
    assert "not used yet" in cli("budget", "show", "b").out
    cli("budget", "charge", "b", event, "--note", "x")
    text = cli("budget", "show", "b").out
    for word in ("odometer", "filter", "[clinic]", "Chain head", "1 started"):
        assert word in text
    assert "fits: a training" in text
    assert "DP-SGD of 2340 steps at sample_rate 0.0043, as charge 1" in text
    assert "1 charge: x" in text
    assert "[clinic]" in cli("budget", "list").out


def test_a_budget_s_table_fits_a_terminal_and_says_which_epsilon_is_which(
    cli: Cli, budget: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console.cache_clear()
    cli("budget", "charge", "b", event, "--note", "a table of counts of visits")
    text = cli("budget", "show", "b").out
    console.cache_clear()
    [row] = [line for line in text.split("\n") if "fits: a training" in line]
    assert "DP-SGD of 2340 steps" in row
    assert "of what" in text
    assert "so these do not add up; privtune budget charges has the ε of each charge alone" in text


def test_a_charge_by_hand_says_why_it_stays_started(cli: Cli, budget: str, event: str) -> None:
    sentence = "A charge by hand stays started until privtune budget settle says"
    assert sentence in cli("budget", "charge", "b", event, "--note", "first").out
    assert sentence in cli("budget", "charges", "b").out


def test_a_charge_by_hand_is_settled_once(cli: Cli, budget: str, event: str) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    settled = document(cli, "budget", "settle", "b-1")
    assert (settled["id"], settled["state"]) == ("b-1", "settled")
    assert "stays started" not in cli("budget", "charges", "b").out
    again = cli("budget", "settle", "b-1")
    assert (again.code, "b-1 is settled" in again.err) == (1, True)


def test_a_charge_of_a_study_is_not_settled_by_hand(cli: Cli, budget: str, url: str) -> None:
    with Ledger(url) as ledger:
        request = ChargeRequest(Gaussian(9.0), study="digits", arm="plain")
        [charge] = ledger.reserve("b", [request], start=True)
    refused = cli("budget", "settle", charge.id)
    assert refused.code == 1
    assert "belongs to study 'digits', arm 'plain'" in refused.err
    with Ledger(url) as ledger:
        assert ledger.charge(charge.id).state == "started"


def test_a_release_that_was_recorded_is_settled(cli: Cli, budget: str, event: str) -> None:
    done = cli("budget", "charge", "b", event, "--note", "leak", "--already-released")
    assert "b-1 (settled)" in done.out
    assert "stays started" not in done.out + cli("budget", "charges", "b").out


def test_charge_refuse_and_say_what_fits(cli: Cli, budget: str, event: str, selection: str) -> None:
    charged = document(cli, "budget", "charge", "b", event, "--note", "first")
    assert (charged["id"], charged["state"], charged["basis"]) == ("b-1", "started", "declared")
    done = cli("budget", "charge", "b", selection, "--note", "second")
    assert (done.code, done.out) == (1, "")
    assert "costs ε = 1.462 alone" in done.err
    assert (
        "a DP-SGD training of 2340 steps at sample_rate 0.0043 with noise_multiplier ≥ " in done.err
    )
    assert (
        "a private selection among 10 such trainings on average, 2 at least, with "
        "noise_multiplier ≥ " in done.err
    )
    assert " alone" in done.err.split("What fits: ")[1]
    assert len(document(cli, "budget", "charges", "b")) == 1


def test_a_note_is_asked_for_with_its_purpose(cli: Cli, budget: str, event: str) -> None:
    refused = cli("budget", "charge", "b", event)
    assert refused.code == 1
    assert "--note is missing: in one line what is released, and by which tool" in refused.err
    assert document(cli, "budget", "charges", "b") == []
    cli("budget", "charge", "b", event, "--note", "x")
    assert "1 charge, ε" in cli("budget", "verify", "b").out


def test_what_is_said_to_fit_fits(
    cli: Cli, budget: str, event: str, selection: str, tmp_path: Path
) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    refusal = cli("budget", "charge", "b", selection, "--note", "second").err
    parts = refusal.split("noise_multiplier ≥ ")[1:]
    sigmas = [float(part.split()[0].strip(";.")) for part in parts]
    for sigma, base in zip(sigmas, (TRAINING, SELECTION), strict=True):
        for factor, code in ((0.97, 1), (1.0, 0)):
            path = tmp_path / "again.json"
            path.write_text(json.dumps(base).replace("1.08", str(sigma * factor)))
            storage = f"sqlite:///{tmp_path}/{sigma}-{factor}.db"
            cli("budget", "create", "b", "--epsilon", "2", "--delta", "1e-5", "--storage", storage)
            cli("budget", "charge", "b", event, "--note", "first", "--storage", storage)
            done = cli("budget", "charge", "b", str(path), "--note", "x", "--storage", storage)
            assert done.code == code, done.err


def test_a_new_budget_s_table_says_that_an_arm_may_take_all_of_it(
    cli: Cli, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = document(cli, "budget", "show", "b")
    assert [arm["epsilon"] for arm in shown["fits"]] == [2.0, 2.0, 2.0]
    assert shown["fits_note"] == ""
    assert "fits" not in document(cli, "budget", "show", "b", "--no-fits")
    cli("budget", "close", "b")
    closed = document(cli, "budget", "show", "b")
    assert (closed["fits"], closed["fits_note"]) == ([], "the budget was closed for good")


def test_costs_are_shown_alone_and_together_and_by_purpose(cli: Cli, budget: str, url: str) -> None:
    with Ledger(url) as ledger:
        block = [ChargeRequest(Gaussian(9.0), note=name) for name in ("one", "two")]
        for charge in ledger.reserve("b", block):
            ledger.start(charge.id)
        ledger.reserve("b", [ChargeRequest(Gaussian(20.0), note="one")], start=True)
    listed = document(cli, "budget", "charges", "b")
    together = [charge["together"] for charge in listed]
    shown = document(cli, "budget", "show", "b", "--no-fits")
    assert together == sorted(together)
    assert together[-1] == shown["spent"]["epsilon"]
    assert all(charge["together"] >= charge["epsilon"] for charge in listed)
    one, two = shown["spendings"]
    assert (one["note"], one["charges"]) == ("one", 2)
    assert together[0] < one["epsilon"] < together[-1]
    assert (two["note"], two["charges"]) == ("two", 1)
    assert two["epsilon"] == listed[1]["epsilon"], "that of one charge is its ε alone"
    table = cli("budget", "charges", "b").out
    assert "together" in table
    assert "a part of δ is set aside" in table


def test_what_studies_noted_is_said_by_who_verifies(cli: Cli, budget: str, url: str) -> None:
    """A sound chain of charges may hold one whose guarantee is limited; a user's note is no such limit."""
    limit = "fixed seed: no guarantee against whoever knows it"
    with Ledger(url) as ledger:
        ours = [ChargeRequest(Gaussian(9.0), study="s", arm=arm, note=limit) for arm in ("a", "b")]
        ledger.reserve("b", [*ours, ChargeRequest(Gaussian(9.0), note="a table")], start=True)
    warned = f"Charges b-1, b-2, as the study noted: {limit}."
    assert document(cli, "budget", "verify", "b")["warnings"] == [warned]
    assert f"Warning: {warned}" in cli("budget", "verify", "b").out


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
        assert (
            "THE BUDGET IS EXCEEDED: all charges to 'b' together cost ε = 4.9474, above" in done.err
        )
        assert done.err.count("\n") == 1
        assert "sound" not in done.out
    found = json.loads(cli("budget", "verify", "b", "--json").out)
    assert (found["valid"], found["within_budget"]) == (True, False)
    assert "b-1" in found["warnings"][1]
    assert json.loads(certificate.read_text())["within_budget"] is False
    assert "This budget is exceeded" in page.read_text()


def test_backup(cli: Cli, budget: str, event: str, tmp_path: Path) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    file = tmp_path / "copy.db"
    made = document(cli, "budget", "backup", str(file))
    assert made == {"file": str(file), "budgets": ["b"], "folders": []}
    log = document(cli, "budget", "verify", "b")
    copied = document(cli, "budget", "verify", "b", "--storage", f"sqlite:///{file}")
    (warning,) = copied.pop("warnings")
    assert "is a copy" in warning
    assert copied.items() <= log.items()
    done = cli("budget", "backup", str(file))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "secret trials" in cli("budget", "backup", str(tmp_path / "other.db")).out


def test_restore(cli: Cli, budget: str, event: str, tmp_path: Path) -> None:
    cli("budget", "charge", "b", event, "--note", "first")
    url = f"sqlite:///{tmp_path / 'copy.db'}"
    cli("budget", "backup", str(tmp_path / "copy.db"))
    refused = cli("budget", "charge", "b", event, "--note", "second", "--storage", url)
    assert (refused.code, "privtune budget restore" in refused.err) == (1, True)
    done = document(cli, "budget", "restore", "--storage", url, "--yes")
    assert "neither knows what is charged to the other" in done["meaning"]
    assert done["budgets"] == ["b"]
    assert cli("budget", "charge", "b", event, "--note", "second", "--storage", url).code == 0
    again = cli("budget", "restore", "--storage", url, "--yes")
    assert (again.code, "is no copy" in again.err) == (1, True)
    assert cli("budget", "restore", "--yes").code == 1, "the original"


def test_void_gives_back(cli: Cli, budget: str, url: str) -> None:
    with Ledger(url) as ledger:
        ledger.reserve("b", [ChargeRequest(Gaussian(9.0), note="[bold]")])
    assert "[bold]" in cli("budget", "charges", "b").out
    made = document(cli, "budget", "void", "b-1", "--yes")
    assert (made["state"], made["gives_back"]) == ("voided", True)
    done = cli("budget", "void", "b-1")
    assert (done.code, "is voided" in done.err) == (1, True)


@pytest.mark.parametrize("started", [False, True])
def test_void_says_beforehand_what_it_gives_back(
    started: bool, cli: Cli, budget: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the budget has started a declared charge stays spent: what is said is what happens."""
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with Ledger(url) as ledger:
        request = ChargeRequest(Gaussian(9.0), study="s", arm="late", plan_digest="1")
        first, second = ledger.reserve("b", [ChargeRequest(Gaussian(9.0)), request])
        if started:
            ledger.start(first.id)
        before = ledger.remaining("b")
    refused = cli("budget", "void", second.id)
    assert refused.code == 1
    assert "Arm 'late' of study 's' can then run only if" in refused.err
    assert ("The budget gets nothing back" in refused.err) is started
    with Ledger(url) as ledger:
        assert ledger.charge(second.id).state == "reserved"
    done = cli("budget", "void", second.id, "--yes")
    assert ("The budget gets nothing back" in done.out) is started
    with Ledger(url) as ledger:
        assert (ledger.remaining("b") > before) is not started


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
        Budget(3.0, 1e-5, name="b"), requested=2.00001, spent=1.00001, remaining=1.99999
    )
    assert "costs ε = 2.001 alone; ε = 1.001 is spent, ε = 1.999 is left" in str(refusal)
