from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import privtune
from privtune.errors import InvalidInputError
from privtune.ledger import Budget, Ledger, UnitMismatchError, verify_certificate
from privtune.strategies import Fixed
from privtune.study import SpecError, Study, StudySpec, plan_study, study_names
from privtune.study.spec import read_yaml
from privtune.tasks import TaskDataError
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, TERMS, simple

pytestmark = pytest.mark.quick


def test_a_unit_that_the_task_does_not_group_by_is_refused(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    budget = {"name": "b", "epsilon": 1, "delta": 1e-5}
    spec = toy_spec(budget={**budget, "unit": "person"})
    with pytest.raises(UnitMismatchError, match="each record by itself, but budget 'b'") as caught:
        privtune.Study.create(spec, storage)
    assert "Group by person (a table: group, max_per_group and unit: person" in str(caught.value)
    with Ledger(storage) as ledger:
        assert ledger.budgets() == ()
        ledger.create_budget(privtune.Budget(1.0, 1e-5, name="b", unit="person"))
    with pytest.raises(privtune.PrivTuneError, match="unit person, and cannot be changed"):
        privtune.Study.create(toy_spec(budget=budget), storage)


def test_arms_share_the_budget_equally_and_together_meet_it() -> None:
    planned = plan_study(toy_spec())
    assert planned.total.epsilon <= 6.0
    assert planned.total.epsilon > 0.99 * 6.0, "the budget is used, not wasted"
    epsilons = [g.epsilon for g in planned.guarantees]
    assert max(epsilons) < 1.005 * min(epsilons)
    # Splitting arithmetically would give each arm 2.0.
    assert min(epsilons) > 2.5


def test_the_total_agrees_with_an_independent_rdp_composition() -> None:
    # Composition of the three arms by dp-accounting's RDP alone: an upper bound on ours.
    import dp_accounting
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    planned = plan_study(toy_spec())
    defaults, selection, hyfree = planned.plans
    q, steps = defaults.training.schedule.sample_rate, defaults.training.schedule.steps

    def sampled(sigma: float, count: int) -> dp_event.DpEvent:
        step = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
        return dp_event.SelfComposedDpEvent(step, count)

    base = selection.training.method.noise_multiplier
    method = hyfree.training.method
    charged = hyfree.event
    accountant = RdpAccountant()
    accountant.compose(sampled(defaults.training.method.noise_multiplier, steps))
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(sampled(base, steps), 4, 1))
    # HyFreeDP as charged: translate its looks one by one.
    from privtune.training.mechanism.transcript import looks_of

    for (rate, atoms), count in looks_of(charged).items():
        assert rate == q
        sigma = sum(1 / s**2 for _, s in atoms) ** -0.5
        accountant.compose(sampled(sigma, count))
    reference = accountant.get_epsilon(1e-5)
    assert planned.total.epsilon <= reference * 1.001
    assert planned.total.epsilon > 0.5 * reference
    assert method.name == "hyfreedp"


def test_a_task_of_half_a_character_is_one_sentence() -> None:
    with pytest.raises(InvalidInputError, match="task = ") as caught:
        toy_spec(task="\ud800:x").load_task()
    assert "\n" not in str(caught.value)


def test_a_spec_file_says_nothing_twice(tmp_path: Path) -> None:
    """PyYAML takes the last of two values: a budget of 40 where somebody else reads 4."""
    spec = tmp_path / "twice.yaml"
    for text, key in (
        ("name: toy\nbudget: {name: toy, epsilon: 4, epsilon: 40}", "epsilon"),
        ("epochs: 3\narms: []\nepochs: 30", "epochs"),
    ):
        spec.write_text(text)
        with pytest.raises(SpecError, match=f"is not YAML: {key} stands twice in one mapping"):
            StudySpec.from_file(spec)


def test_a_spec_file_may_change_what_it_takes_from_elsewhere() -> None:
    a, b = {"x": 1}, {"x": 2, "y": 0.001}
    text = "{a: &a {x: 1}, b: &b {<<: *a, x: 2, y: 1e-3}, c: {<<: *b}, d: {<<: *b, x: 3}}"
    assert read_yaml(text) == {"a": a, "b": b, "c": b, "d": {**b, "x": 3}}


def test_numbers_with_an_exponent_need_no_point() -> None:
    """PyYAML takes 1e-3 for text, which a categorical takes too."""
    words = read_yaml("[Yes, no, ON, off, y, true, False, null]")
    assert words == ["Yes", "no", "ON", "off", "y", True, False, None]
    assert read_yaml("[1e-3, -1E+5, 1.e3, 0.5e-3, 1e5x, e5]") == [
        1e-3,
        -1e5,
        1e3,
        5e-4,
        "1e5x",
        "e5",
    ]


def test_noise_is_said_in_the_spec_and_in_the_charge(storage: str) -> None:
    arms = [toy_spec().arms[0].model_dump()]
    study = Study.create(toy_spec(arms=arms, noise="secure", seed=1), storage)
    assert study.plans[0].training.noise == NoiseOptions(source="chacha20", floating_point="grid")
    study.run()
    (charge,) = study._life.ledger.charges("toy")
    seeded = "fixed seed: no guarantee against whoever knows it"
    assert charge.note == f"noise: chacha20, grid; {seeded}"
    assert verify_certificate(study.certificate()).charges == 1
    assert StudySpec.parse(study.spec.model_dump(mode="json")).noise == "secure"


def test_the_charges_of_an_open_study_say_its_seed_too(storage: str) -> None:
    for name, seed, note in (("without", None, ""), ("seeded", 0, "fixed seed: no guarantee")):
        budget = privtune.Budget(6.0, 1e-5, name=name)
        study = privtune.create_study(name, budget=budget, storage=storage, seed=seed)
        study.optimize(privtune.make_task(simple, **OWN), strategy=Fixed(), epsilon=1.0, **TERMS)
        (charge,) = study.certificate()["charges"]
        assert charge["note"].startswith(note), name
        assert bool(charge["note"]) == bool(note), name


def test_a_table_that_is_gone_says_what_to_do(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age,ill\n40,0\n")
    task = {
        "type": "tabular", "path": str(path), "target": "ill", "classes": [0, 1],
        "bounds": {"age": [0, 100]}, "train": 60, "validation": 20, "test": 20,
    }  # fmt: skip
    study = Study.create(toy_spec(task=task, arms=[toy_spec().arms[0].model_dump()]), storage)
    path.unlink()
    with pytest.raises(TaskDataError, match=r"put it back .*privtune study delete toy") as caught:
        study.run()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [arm.state for arm in study.status()] == ["planned"]
    study.delete()
    assert study_names(storage) == []


def test_noise_of_an_arm_of_ones_own(storage: str) -> None:
    options = NoiseOptions(floating_point="four-draws")
    for name, noise in (("fields", options.to_dict()), ("options", options)):
        budget = Budget(4.0, 1e-5, name=name)
        study = privtune.create_study(name, budget=budget, noise=noise, storage=storage)
        study.optimize(privtune.make_task(simple, **OWN), strategy=Fixed(), **TERMS)
        assert study.plans[0].training.noise == options


@pytest.mark.parametrize("field", ["epochs", "expected_batch_size", "seed", "repeats", "epsilon"])
@pytest.mark.parametrize("text", ["0x" + "f" * 9000, "-0x" + "f" * 9000, "x" * 9000])
def test_a_number_of_thousands_of_digits_is_one_short_sentence(field: str, text: str) -> None:
    document = {**toy_spec().model_dump(mode="json"), field: yaml.safe_load(text)}
    with pytest.raises(SpecError) as caught:
        StudySpec.parse(document)
    message = str(caught.value)
    assert field in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "size", [1.5, 64.0, True, "64", 0, math.nan, pytest.param(10**5000, id="huge"), None]
)
def test_a_batch_is_a_whole_number_of_records(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a whole number"):
        Schedule.from_epochs(records=100, expected_batch_size=size, epochs=2)


@pytest.mark.parametrize("storage", ["", " ", 3, b"privtune.db"])
def test_what_is_no_storage_is_a_sentence(storage: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"storage = .* must be the URL of a database"):
        privtune.create_study("toy", budget=privtune.Budget(1.0, 1e-5, name="b"), storage=storage)
    with pytest.raises(InvalidInputError, match=r"storage = .* must be the URL of a database"):
        privtune.load_study("toy", storage=storage)
