"""A δ that publishing a random record would satisfy is refused while arms are planned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

import privtune
from privtune.errors import InvalidInputError
from privtune.ledger import Ledger
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import Study, plan_study, study_names
from privtune.study.delta import check_delta, protected_records
from tests.cli.conftest import Cli, cli
from tests.study.conftest import FIXED, toy_spec
from tests.study.elsewhere import OWN, TERMS, linear
from tests.toy import blobs, public_blobs

__all__ = ["cli"]

RECORDS = 300  # of the toy task: the test split is public
TOO_MUCH = 1.01 / RECORDS
MUCH = 0.5 / RECORDS
SAID = r"is above 1 / \(number of protected records\): a program that publishes one random record"


def spec_of(delta: float, **more: Any) -> Any:
    return toy_spec(arms=[FIXED], budget={"name": "toy", "epsilon": 6.0, "delta": delta}, **more)


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any("is large for its records" in record.getMessage() for record in caplog.records)


def test_records_that_are_public_are_not_protected() -> None:
    assert protected_records(blobs()) == RECORDS
    assert protected_records(public_blobs()) == 240  # the validation split is public, too


@pytest.mark.parametrize(
    ("delta", "refused", "warns"),
    [
        (0.5, True, False),
        (TOO_MUCH, True, False),
        (1.0 / RECORDS, False, True),
        (MUCH, False, True),
        (0.11 / RECORDS, False, True),
        (0.1 / RECORDS, False, False),
        (1e-5, False, False),
    ],
)
def test_a_planned_study_says_what_delta_means(
    storage: str, caplog: pytest.LogCaptureFixture, delta: float, refused: bool, warns: bool
) -> None:
    if refused:
        with pytest.raises(InvalidInputError, match=SAID) as error:
            Study.create(spec_of(delta), storage)
        assert "such as 0.0001." in str(error.value)
        assert study_names(storage) == []
        with Ledger(storage) as ledger:
            assert not ledger.budgets()
    else:
        Study.create(spec_of(delta), storage).close()
    assert warned(caplog) is warns
    # What is proposed is taken without a word.
    caplog.clear()
    plan_study(spec_of(1e-4))
    assert not warned(caplog)


def test_whoever_was_told_goes_on(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    Study.create(spec_of(TOO_MUCH), storage, force=True).close()
    assert warned(caplog)
    study = Study("toy", storage)
    (release,) = study.run()
    assert release.guarantee.delta == TOO_MUCH


def test_the_command_line_says_it_and_takes_force(cli: Cli, tmp_path: Path) -> None:
    file, storage = tmp_path / "spec.yaml", f"sqlite:///{tmp_path / 'p.db'}"
    file.write_text(yaml.safe_dump(spec_of(TOO_MUCH).model_dump(mode="json")))
    commands = [
        ("study", "plan", str(file)),
        ("study", "create", str(file), "--storage", storage),
        ("study", "run", str(file), "--storage", storage, "--no-mlflow"),
    ]
    for command in commands:
        done = cli(*command)
        assert done.code == 1
        assert "publishes one random record of" in done.err
        assert "--force" in done.err
        assert "Traceback" not in done.err
    for command in commands:
        assert cli(*command, "--force").code == 0


@pytest.mark.parametrize("strategy", [Fixed(), PapernotSteinke(mean_runs=2)], ids=lambda s: s.name)
def test_every_arm_of_an_open_study_is_asked(storage: str, strategy: Any) -> None:
    budget = privtune.Budget(6.0, 1.01 / 300, name="open")  # 240 and 60 records
    study = privtune.create_study("open", budget=budget, storage=storage)
    with pytest.raises(InvalidInputError, match=SAID):
        study.optimize(privtune.make_task(linear, **OWN), strategy=strategy, **TERMS)
    with Ledger(storage) as ledger:
        assert not ledger.charges("open")
    assert (
        study.optimize(
            privtune.make_task(linear, **OWN), strategy=strategy, **TERMS, force=True
        ).arm
        == strategy.arm
    )


def test_python_creates_a_study_by_force(storage: str) -> None:
    given: dict[str, Any] = {
        "budget": privtune.Budget(6.0, TOO_MUCH, name="toy"),
        "task": "tests.toy:blobs",
        "arms": [FIXED],
        "epochs": 1,
        "expected_batch_size": 24,
        "storage": storage,
    }
    with pytest.raises(InvalidInputError, match="force=True"):
        privtune.create_study("toy", **given)
    privtune.create_study("toy", **given, force=True).close()


def test_a_declared_mechanism_is_asked(storage: str) -> None:
    budget = privtune.Budget(6.0, 0.02, name="open")
    study = privtune.create_study("open", budget=budget, storage=storage)
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=100
    )

    def objective(trial: Any) -> Any:
        noise = trial.plan.noise_multiplier
        return trial.result({"w": [0.5 * noise]})

    given = {"strategy": Fixed(), "mechanism": mechanism}
    with pytest.raises(InvalidInputError, match=SAID):
        study.optimize_declared(objective, **given)
    assert study.optimize_declared(objective, **given, force=True).params == {}


def test_records_of_a_benchmark_are_at_no_risk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_delta(0.5, 100, benchmark=True)
    assert warned(caplog)


def test_what_has_no_guarantee_has_no_delta(caplog: pytest.LogCaptureFixture) -> None:
    arms = [{"name": "grid", "strategy": "non-private-grid", "points": 2}]
    plan_study(toy_spec(arms=arms, budget={"name": "toy", "epsilon": 6.0, "delta": 0.5}))
    assert not warned(caplog)


def test_units_are_counted_where_units_are_protected() -> None:
    with pytest.raises(
        InvalidInputError, match=r"number of protected persons\): .* one random person"
    ):
        check_delta(0.02, 100, unit="person")
