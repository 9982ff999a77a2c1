"""A budget knows its dataset: by public facts, in the log, held against every charge."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Dataset,
    DatasetMismatchError,
    Ledger,
    LedgerCorruptedError,
    export_certificate,
    render_certificate,
    verify,
    verify_certificate,
)
from privtune.ledger.chain import Kind
from privtune.ledger.log import Line
from privtune.ledger.schema import entries
from privtune.ledger.values import ChargeState

PATIENTS = Dataset("patients", "patients.csv", ("age", "sex", "outcome"))
DIGITS = Dataset("digits", "digits.csv", ("p0", "p1", "label"))


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'privtune.db'}"


@pytest.fixture
def ledger(storage: str) -> Iterator[Ledger]:
    with Ledger(storage) as opened:
        yield opened


def request(dataset: Dataset | None, noise: float = 30.0) -> ChargeRequest:
    return ChargeRequest(Gaussian(noise), dataset=dataset)


def made(ledger: Ledger, *datasets: Dataset | None, dataset: str = "") -> Ledger:
    ledger.create_budget(Budget(8.0, 1e-5, name="hospital", dataset=dataset))
    for each in datasets:
        ledger.reserve("hospital", [request(each)])
    return ledger


SAME: Mapping[str, tuple[Dataset, Dataset]] = {
    "the same file": (PATIENTS, PATIENTS),
    "other columns of the same file": (PATIENTS, Dataset("patients", "patients.csv", ("height",))),
    "arrays and arrays": (Dataset(), Dataset()),
    "a frame of the file's columns": (PATIENTS, Dataset(columns=("age", "outcome"))),
    "frames that share half of their columns": (
        Dataset(columns=("a", "b")),
        Dataset(columns=("b", "c", "d")),
    ),
    "a task of the same name": (Dataset("clinic"), Dataset("clinic")),
    "a declared name": (PATIENTS, Dataset("patients", "/moved/p.csv", declared=True)),
    "arrays of a declared name": (PATIENTS, Dataset("patients", declared=True)),
}
OTHER: Mapping[str, tuple[Dataset, Dataset]] = {
    "another file": (PATIENTS, DIGITS),
    "another file of the same name": (PATIENTS, Dataset("patients", "old/patients.csv")),
    "arrays after a file": (PATIENTS, Dataset()),
    "a file after arrays": (Dataset(), PATIENTS),
    "a frame of other columns": (PATIENTS, Dataset(columns=("p0", "p1", "outcome"))),
    "frames that share less than half": (
        Dataset(columns=("a", "b", "c")),
        Dataset(columns=("c", "d", "e")),
    ),
    "a task of another name": (Dataset("clinic"), Dataset("digits")),
    "arrays after a task": (Dataset("clinic"), Dataset()),
    "another declared name": (PATIENTS, Dataset("digits", "patients.csv", declared=True)),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_dataset_is_charged(ledger: Ledger, case: str) -> None:
    first, second = SAME[case]
    made(ledger, first, second)
    assert len(ledger.charges("hospital")) == 2
    assert verify(ledger.log.storage, "hospital").charges == 2


@pytest.mark.parametrize("case", OTHER)
def test_another_dataset_is_refused_and_charges_nothing(ledger: Ledger, case: str) -> None:
    first, second = OTHER[case]
    made(ledger, first)
    with pytest.raises(DatasetMismatchError) as refused:
        ledger.reserve("hospital", [request(second)])
    assert "hospital" in str(refused.value)
    assert "--dataset" in str(refused.value)
    assert len(ledger.charges("hospital")) == 1
    with pytest.raises(DatasetMismatchError):
        ledger.check_dataset("hospital", second)
    with pytest.raises(
        DatasetMismatchError
    ):  # what has happened is of this dataset, or of another budget
        ledger.record("hospital", request(second))


@pytest.mark.parametrize("case", OTHER)
def test_the_name_in_a_refusal_is_the_way_on(ledger: Ledger, case: str) -> None:
    """Whatever moved: who declares the name that the sentence gives is admitted."""
    first, second = OTHER[case]
    made(ledger, first)
    with pytest.raises(DatasetMismatchError) as refused:
        ledger.reserve("hospital", [request(second)])
    name = str(refused.value).rpartition("--dataset '")[2].partition("'")[0]
    declared = Dataset(name, second.source, second.columns, declared=True)
    ledger.reserve("hospital", [request(declared)])
    again = Dataset("", second.source, second.columns)
    if second.source:  # from then on that place is known
        ledger.reserve("hospital", [request(again)])
    assert verify(ledger.log.storage, "hospital").within_budget


def test_two_datasets_in_one_request_are_refused(ledger: Ledger) -> None:
    made(ledger)
    with pytest.raises(DatasetMismatchError):
        ledger.reserve("hospital", [request(PATIENTS), request(DIGITS)])
    assert ledger.charges("hospital") == ()
    assert ledger.dataset("hospital") == ""


def test_a_name_given_at_creation_binds(ledger: Ledger) -> None:
    made(ledger, dataset="clinic register")
    with pytest.raises(DatasetMismatchError, match="protects clinic register"):
        ledger.reserve("hospital", [request(PATIENTS)])
    ledger.reserve("hospital", [request(Dataset())])  # arrays: the budget's name is all there is
    named = Dataset("clinic register", "patients.csv", declared=True)
    ledger.reserve("hospital", [request(named)])
    assert ledger.dataset("hospital") == "clinic register"


def test_a_charge_that_was_given_up_says_nothing(ledger: Ledger) -> None:
    made(ledger, DIGITS)
    ledger.void("hospital-1")
    assert ledger.dataset("hospital") == ""
    ledger.reserve("hospital", [request(PATIENTS)])
    assert ledger.dataset("hospital") == "patients"
    assert verify(ledger.log.storage, "hospital").charges == 2


def test_a_charge_without_a_dataset_is_the_budgets(ledger: Ledger) -> None:
    made(ledger, None, PATIENTS, None)
    assert ledger.datasets("hospital") == (PATIENTS,)
    assert ledger.charges("hospital")[0].dataset is None


def test_a_plan_that_is_charged_is_not_asked_again(ledger: Ledger) -> None:
    made(ledger)
    first = ChargeRequest(Gaussian(30.0), plan_digest="one", dataset=PATIENTS)
    moved = ChargeRequest(Gaussian(30.0), plan_digest="one", dataset=Dataset("p", "/moved/p.csv"))
    [charge] = ledger.reserve("hospital", [first])
    assert ledger.reserve("hospital", [moved]) == (charge,)


def test_verify_finds_what_was_admitted_behind_the_ledger(ledger: Ledger) -> None:
    """Hashes recomputed: the log is a chain, and names two datasets."""
    made(ledger, PATIENTS)
    body = {
        "study": "", "arm": "", "note": "", "plan_digest": "", "unit": "record", "basis": "declared",
        "event": Gaussian(30.0).to_dict(), "dataset": DIGITS.to_dict(),
    }  # fmt: skip
    with pytest.raises(LedgerCorruptedError, match="digits"):
        ledger.log.write("hospital", lambda *_: [Line(Kind.RESERVED, 2, body=body)])
    with pytest.raises(PrivTuneError, match="entry 3"):
        verify(ledger.log.storage, "hospital")


DAMAGED: list[Any] = [
    None, 7, "patients", [], {}, {"name": "a"}, {**PATIENTS.to_dict(), "name": 3},
    {**PATIENTS.to_dict(), "columns": "ab"}, {**PATIENTS.to_dict(), "columns": [1]},
    {**PATIENTS.to_dict(), "declared": 1}, {**PATIENTS.to_dict(), "more": 1},
    {**PATIENTS.to_dict(), "source": None}, {**PATIENTS.to_dict(), "name": "\0"},
]  # fmt: skip


@pytest.mark.parametrize("damage", range(len(DAMAGED)))
def test_a_damaged_dataset_is_one_sentence(ledger: Ledger, storage: str, damage: int) -> None:
    """Of an entry whose hashes were made anew, as of one whose bytes were changed."""
    made(ledger)
    body = {
        "study": "", "arm": "", "note": "", "plan_digest": "", "unit": "record", "basis": "declared",
        "event": Gaussian(30.0).to_dict(), "dataset": DAMAGED[damage],
    }  # fmt: skip
    with pytest.raises(LedgerCorruptedError, match="entry 2 of budget 'hospital' is wrong"):
        ledger.log.write("hospital", lambda *_: [Line(Kind.RESERVED, 1, body=body)])
    with Ledger(storage) as fresh, pytest.raises(LedgerCorruptedError, match="entry 2"):
        fresh.dataset("hospital")


def test_the_dataset_is_under_the_chain(ledger: Ledger, storage: str) -> None:
    made(ledger, PATIENTS)
    with ledger.log.storage.write() as connection:
        row = connection.execute(sa.select(entries).where(entries.c.seq == 2)).one()
        changed = json.dumps({**json.loads(row.body), "dataset": DIGITS.to_dict()})
        for name in ("privtune_entries_no_UPDATE", "privtune_entries_no_DELETE"):
            connection.execute(sa.text(f"DROP TRIGGER {name}"))
        connection.execute(sa.update(entries).where(entries.c.seq == 2).values(body=changed))
    with Ledger(storage) as fresh, pytest.raises(LedgerCorruptedError, match="entry 2"):
        verify(fresh.log.storage, "hospital")


def test_a_certificate_names_the_dataset_and_where_it_was_read(ledger: Ledger) -> None:
    moved = Dataset("patients", "/moved/p.csv", declared=True)
    made(ledger, PATIENTS, moved)
    certificate = export_certificate(ledger.log.storage, "hospital")
    assert certificate["budget"]["dataset"] == "patients"
    assert certificate["charges"][0]["dataset"] == PATIENTS.to_dict()
    page = render_certificate(certificate)
    assert "patients (patients.csv; columns age, sex, outcome)" in page
    assert "/moved/p.csv" in page
    verify_certificate(certificate)
    edited = {**certificate, "budget": {**certificate["budget"], "dataset": "digits"}}
    with pytest.raises(LedgerCorruptedError):
        verify_certificate(edited)


def test_two_budgets_over_one_file_are_said(ledger: Ledger) -> None:
    made(ledger, PATIENTS)
    assert ledger.check_dataset("second", PATIENTS) == (
        "patients.csv is also charged to budget hospital: for the people in it, the ε of both add up."
    )
    ledger.create_budget(Budget(1.0, 1e-5, name="second"))
    ledger.reserve("second", [request(PATIENTS)])
    assert (
        "budgets hospital, second: for the people in it, the ε of all add up"
        in ledger.check_dataset("third", PATIENTS)
    )
    assert "hospital" in ledger.check_dataset("third", Dataset("patients", declared=True))
    for other in (DIGITS, Dataset(), Dataset(columns=PATIENTS.columns)):
        assert ledger.check_dataset("third", other) == ""


def test_a_budget_has_a_name() -> None:
    with pytest.raises(TypeError, match="name"):
        Budget(4.0, 1e-5)  # type: ignore[call-arg]


def test_texts_that_cannot_be_stored_are_refused() -> None:
    for wrong in ({"name": "\0"}, {"source": 3}, {"columns": ("\ud800",)}):
        with pytest.raises(InvalidInputError, match="dataset"):
            Dataset(**wrong)  # type: ignore[arg-type]


def test_datasets_stand_in_the_order_of_the_charges_that_were_not_voided(ledger: Ledger) -> None:
    """Compared with the definition, at each step of random lives and for parts of the charges."""
    alike = ("age", "sex", "outcome")  # the same columns, so that none is refused
    datasets = [Dataset(f"copy-{n}", "", alike) for n in range(3)]
    rng = random.Random(7)
    for life in range(6):
        name = f"life-{life}"
        ledger.create_budget(Budget(200.0, 1e-5, name=name))
        open_charges: list[str] = []
        for _ in range(14):
            if open_charges and rng.random() < 0.45:
                charge = open_charges.pop(rng.randrange(len(open_charges)))
                ledger.void(charge) if rng.random() < 0.7 else ledger.start(charge)
            else:
                dataset = rng.choice([*datasets, None])
                (charge,) = ledger.reserve(name, [request(dataset, noise=80.0)])
                open_charges.append(charge.id)
            history = ledger.log.current(name)
            for numbers in (list(history.charges), rng.sample(list(history.charges), 1)):
                live = [
                    history.charges[number].dataset
                    for number in sorted(numbers)
                    if history.charges[number].state is not ChargeState.VOIDED
                ]
                expected = list(dict.fromkeys(each for each in live if each is not None))
                assert history.only(numbers).datasets == expected
            assert history.datasets == history.only(history.charges).datasets
        assert verify(ledger.log.storage, name).charges == len(ledger.charges(name))
