"""A unit is one record: clipped, sampled, charged and scored as one, whatever trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import privtune
from privtune.accounting import Gaussian, PoissonSampled, Repeated
from privtune.audit import audit
from privtune.errors import InvalidInputError
from privtune.ledger import Ledger, export_certificate
from privtune.strategies import ScorePlan
from privtune.tasks import Sizes, TaskData, TaskDataError, by_unit, get_task, unit_records
from privtune.tasks.own import own_task
from privtune.training.engine.train import TrainableCandidate, Training
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import load_params
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.scoring import released_sums, score
from privtune.training.methods import FixedDPSGD
from privtune.views.report import render_study
from studies.harness import train
from tests.audit.test_audit import fixed
from tests.statistical.rounds import DELTA
from tests.toy import blobs

MOST = 4
FIXED = {
    "name": "a",
    "strategy": "fixed",
    "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
}


def groups():
    made = torch.Generator().manual_seed(3)
    return tuple(
        torch.randint(count, (rows,), generator=made) + 1000 * n
        for n, (rows, count) in enumerate(((240, 60), (60, 15), (60, 15)))
    )


def conv():
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def of_units(rows=None, **more):
    rows = replace(rows or blobs(), **more)
    return by_unit(rows, unit="person", most=MOST, sizes=Sizes(60, 15, 15), groups=groups)


def numbers():
    """A regression: what is to be told of each row is its first two features' sum, in [0, 1]."""

    def of(data):
        return TensorData(data.x, torch.sigmoid(data.x[:, :2].sum(dim=1)))

    def load():
        data = blobs().load()
        return TaskData(of(data.train), of(data.validation), of(data.test))

    return of_units(
        classes=None,
        target_range=(0.0, 1.0),
        load=load,
        model=lambda: nn.Linear(6, 1),
        loss=lambda outputs, targets: (outputs.squeeze(-1) - targets) ** 2,
    )


def by_micro_batches(task, data, start, norm):
    """Return one step of clipped descent, a unit's rows at a time, by the row model alone."""
    rows, total = task.model(), torch.zeros_like(start)
    load_params(rows, start)
    for x, y in zip(data.x, data.y, strict=True):
        there = y.isfinite() if task.classes is None else y >= 0
        rows.zero_grad()
        outputs = rows.inner(x[there])
        if task.classes is None:
            (outputs.squeeze(-1) - y[there]).square().sum().backward()
        else:
            nn.functional.cross_entropy(outputs, y[there], reduction="sum").backward()
        gradient = torch.cat([p.grad.flatten() for p in rows.parameters()])
        total += gradient * min(1.0, norm / float(gradient.norm()))
    return start - total / task.train_records


@pytest.mark.parametrize(
    "make",
    [of_units, lambda: of_units(model=conv), numbers],
    ids=["linear", "convolution", "regression"],
)
def test_a_step_is_that_of_micro_batches_of_one_unit(make):
    task = make()
    data = task.load().train
    terms = {"learning_rate": 1.0, "max_grad_norm": 0.5}
    options = {"model": task.model, "loss": task.loss, "data": data, "device": "cpu"}
    secrets = [bytes([1]) * 32] * 2
    still, moved = (
        train(
            FixedDPSGD(0.0),
            Schedule(task.train_records, 1.0, 1),
            candidates=[{**terms, "learning_rate": rate}] * 2,
            secrets=secrets,
            **options,
        ).params[0]
        for rate in (1e-12, 1.0)
    )
    expected = by_micro_batches(task, data, still, 0.5)
    assert (still - moved).norm() > 0.01
    assert torch.allclose(moved, expected, atol=1e-6)


def cross_entropy(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def squared(model, x, y):
    return (model(x).squeeze(-1) - y) ** 2


@pytest.mark.parametrize(
    ("make", "loss_of"),
    [(of_units, cross_entropy), (numbers, squared)],
    ids=["classes", "numbers"],
)
def test_a_build_clips_units(make, loss_of):
    task = make()
    data = task.load().train
    model = task.model()
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    own = own_task(lambda trial: None, loss=loss_of, data=data, split={"train": 60})
    one = TrainableCandidate(
        model,
        bytes(32),
        {"max_grad_norm": 0.5},
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    schedule = Schedule(task.train_records, 1.0, 1)
    (done,) = Training(FixedDPSGD(0.0), schedule, own.loss_of, data, device="cpu").of([one])
    assert torch.allclose(done.params, by_micro_batches(task, data, start, 0.5), atol=1e-6)


def test_the_charge_is_the_same_event_at_the_units_rate(tmp_path):
    task = of_units()
    study = privtune.create_study(
        "people",
        task="tests.tasks.test_units:of_units",
        storage=f"sqlite:///{tmp_path / 'p.db'}",
        budget=privtune.Budget(4.0, 1e-5, name="people", unit="person"),
        arms=[FIXED],
        epochs=2,
        expected_batch_size=12,
    )
    [plan] = study.plans
    assert isinstance(plan.event.event, PoissonSampled)
    assert isinstance(plan.event.event.event, Gaussian)
    assert plan.event.event.rate == 12 / task.train_records
    assert plan.public_facts["a record"] == "all rows of one person, at most 4 of them"
    study.run()
    [release] = study.releases()
    assert release.weights.isfinite().all()
    with Ledger(study.storage) as ledger:
        certificate = export_certificate(ledger.log.storage, "people")
    assert "all rows of one person, at most 4 of them" in str(certificate["entries"])
    study.close()


@dataclass(frozen=True)
class Standing(FixedDPSGD):
    """DP-SGD that stays where it begins and keeps the gradients that are released there."""

    seen: ClassVar[list[torch.Tensor]] = []

    def update(self, state, oracle):
        clipping = self.clipping_of(state.max_grad_norm)
        self.seen.append(self.gradient(oracle, state.params, clipping)[0].double())
        return state


def releases_on(data, task, schedule, norm):
    """Return the mean gradients that a training releases in each step, with equal random numbers."""
    Standing.seen.clear()
    train(
        Standing(0.5),
        schedule,
        model=task.model,
        loss=task.loss,
        data=data,
        device="cpu",
        candidates=[{"learning_rate": 1.0, "max_grad_norm": norm}],
        secrets=[bytes([5]) * 32],
    )
    return torch.stack(Standing.seen)


def test_correlated_noise_divides_units_and_not_their_rows():
    """A person's rows, however many, are in the samples of one turn in four, and move each by the norm."""
    task = of_units()
    data = task.load().train
    schedule = Schedule(task.train_records, 0.25, 12, bands=4)  # at rate 1 in each group
    norm = 0.5
    whole = releases_on(data, task, schedule, norm) * schedule.expected_batch_size
    turns_of = []
    several = (data.y >= 0).sum(1).argsort(descending=True)[:12].tolist()
    assert int((data.y[several] >= 0).sum(1).min()) >= 3
    for person in several:
        y = data.y.clone()
        y[person] = -1  # none of the person's rows
        without = releases_on(replace(data, y=y), task, schedule, norm)
        moved = (whole - without * schedule.expected_batch_size).norm(dim=1)
        steps = (moved > 0.0).nonzero().flatten()
        turns = set((steps % 4).tolist())
        assert len(turns) == 1
        assert len(steps) == schedule.rounds == 3
        assert float(moved.max()) <= norm * (1.0 + 1e-4)
        turns_of.extend(turns)
    assert len(set(turns_of)) > 1
    assert Standing(0.5).event(schedule) == Repeated(3, PoissonSampled(1.0, Gaussian(0.5)))


def test_the_charge_of_correlated_noise_counts_units(tmp_path):
    """By the numbers of persons, 60 in training, and not by those of the rows, 240."""
    study = privtune.create_study(
        "people",
        task="tests.tasks.test_units:of_units",
        storage=f"sqlite:///{tmp_path / 'p.db'}",
        budget=privtune.Budget(4.0, 1e-5, name="people", unit="person"),
        arms=[FIXED],
        epochs=2,
        expected_batch_size=12,
        noise={"correlation": "banded", "bands": 3},
    )
    [plan] = study.plans
    noise_multiplier = plan.training.method.noise_multiplier
    step = PoissonSampled(3 * (12 / 60), Gaussian(noise_multiplier))
    assert plan.event == Repeated(4, step)  # ten steps, of which a group has four at most
    study.run()
    [release] = study.releases()
    assert 3.9 < release.guarantee.epsilon <= 4.0
    assert release.weights.isfinite().all()
    study.close()


@pytest.mark.parametrize("kind", ["accuracy", "loss", "mse"])
def test_a_score_is_the_mean_of_units_and_a_unit_moves_it_by_one_record(kind):
    task = numbers() if kind == "mse" else of_units()
    data, model = task.load().validation, task.model()
    options = {"target_range": (0.0, 1.0)} if kind == "mse" else {}
    if kind == "loss":
        options = {"bound": 0.5}
    plan = ScorePlan(15, None, metric=kind, options=options)
    (metric,) = plan.make_metrics()

    def asked(records):
        return score(plan, model, records, rng=np.random.default_rng(0), loss=task.loss).score

    def sums(records):
        (released,) = released_sums(plan, model, records, np.random.default_rng(0), task.loss)
        return released

    there = data.y.isfinite() if kind == "mse" else data.y >= 0
    outputs = model(data.x).detach()
    rows = {
        "accuracy": outputs.argmax(-1) == data.y,
        "mse": -(outputs[..., 0].clamp(0.0, 1.0) - data.y).square(),
    }
    if kind in rows:
        each = (rows[kind].where(there, torch.tensor(0)).sum(1) / there.sum(1)).double()
        counted = there.any(1)  # a unit without rows is no record
        assert asked(data) == pytest.approx(float(each[counted].mean()))
    for left in range(len(data)):
        keep = torch.arange(len(data)) != left
        less = replace(data, x=data.x[keep], y=data.y[keep], groups=None)
        assert np.linalg.norm(sums(data) - sums(less)) <= metric.sensitivity + 1e-12


def test_a_unit_is_in_one_split_and_gives_way_to_public_ones():
    x, y = torch.arange(6.0).view(6, 1), torch.zeros(6, dtype=torch.long)
    data = TensorData(x, y)
    rows = replace(blobs(), input_shape=(1,), load=lambda: TaskData(data, data, data))
    ids = (torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1, 1, 3, 3, 3, 4]), torch.full((6,), 2))
    for public, trained in ((False, [2, 2]), (True, [2])):  # unit 2 is in the public test split
        task = by_unit(
            replace(rows, public_validation=public),
            unit="person",
            most=3,
            sizes=Sizes(3, 3, 3),
            groups=lambda: ids,
        )
        found = task.load()
        assert [int(n) for n in (found.train.y >= 0).sum(1)] == trained
        counts = sorted(int(n) for n in (found.validation.y >= 0).sum(1))
        assert counts == ([1, 2, 3] if public else [1, 3])


def test_rows_beyond_the_most_and_unusable_rows_are_left_out():
    data = TensorData(
        torch.arange(5.0).view(5, 1),
        torch.tensor([0, 1, 2, 0, 1]),
        unusable=torch.tensor([True, False, False, False, False]),
    )
    found = unit_records(data, torch.tensor([9, 9, 9, 9, 4]), most=2, unit="person")
    assert found.y.tolist() == [[1, -1], [1, 2]]
    assert found.x[1, :, 0].tolist() == [1.0, 2.0]
    assert found.sealed_size
    y = torch.tensor([0.5, float("nan"), 0.25, float("inf")])
    rows = TensorData(torch.arange(4.0).view(4, 1), y)
    of_rows = replace(blobs(), classes=None, target_range=(0.0, 1.0), input_shape=(1,))
    task = by_unit(
        replace(of_rows, load=lambda: TaskData(rows, rows, rows)),
        unit="person",
        most=3,
        sizes=Sizes(2, 1, 1),
        groups=lambda: tuple(torch.tensor([0, 0, 0, 1]) + 10 * n for n in range(3)),
    )
    assert task.load().train.y.nan_to_num(-1).tolist() == [[0.5, 0.25, -1.0]]  # no number, no row


@pytest.mark.quick
def test_what_cannot_take_units_refuses():
    with pytest.raises(InvalidInputError, match="already"):
        by_unit(of_units(), unit="person", most=2, sizes=Sizes(1, 1, 1), groups=groups)
    for most in (0, True, 1e3):
        with pytest.raises(InvalidInputError, match="most"):
            by_unit(blobs(), unit="person", most=most, sizes=Sizes(1, 1, 1), groups=groups)
    with pytest.raises(InvalidInputError, match="unit"):
        by_unit(blobs(), unit=" ", most=2, sizes=Sizes(1, 1, 1), groups=groups)
    with pytest.raises(TaskDataError, match="each row"):
        unit_records(blobs().load().train, torch.zeros(3, dtype=torch.long), most=2, unit="person")
    with pytest.raises(InvalidInputError, match="canary alone"):
        audit(fixed(), delta=DELTA, task=of_units(), runs=100)


def table(path, **more):
    """Write a made-up table of visits, and return a spec of it: people differ in how many they have."""
    made = np.random.default_rng(5)
    lines = ["who,age,dose,ill"]
    for person in range(300):
        for _ in range(int(made.integers(1, 7))):
            age, dose = made.uniform(20, 80), made.uniform(0, 10)
            lines.append(
                f"p{person},{age:.1f},{dose:.2f},{int(age + 4 * dose + made.normal(0, 5) > 70)}"
            )
    lines.insert(9, ",50.0,5.00,1")  # nobody's
    path.write_text("\n".join(lines))
    return {
        "type": "tabular", "path": str(path), "target": "ill", "classes": [0, 1],
        "bounds": {"age": [0, 100], "dose": [0, 10]}, "train": 240, "validation": 30, "test": 30,
        **more,
    }  # fmt: skip


GROUP = {"group": "who", "max_per_group": 4, "unit": "person"}


def test_a_table_is_grouped_by_a_column(tmp_path):
    task = get_task(table(tmp_path / "visits.csv", **GROUP))
    assert (task.unit, task.input_shape, task.train_records) == ("person", (4, 2), 240)
    data = task.load_checked()
    splits = [getattr(data, name) for name in ("train", "validation", "test")]
    people = [set(one.groups.tolist()) for one in splits]
    assert sum(map(len, people)) == len(set.union(*people)) == 300, "each in one split, none lost"
    assert max(int((one.y >= 0).sum(1).max()) for one in splits) == 4
    assert [len(one) for one in splits] == list(map(len, people))
    alone = get_task(table(tmp_path / "visits.csv", group="who", max_per_group=9)).load()
    rows = sum(int((getattr(alone, n).y >= 0).sum()) for n in ("train", "validation", "test"))
    assert rows == len((tmp_path / "visits.csv").read_text().splitlines()) - 2
    numbers = {"target": "dose", "target_range": [0, 10], "bounds": {"age": [0, 100]}}
    spec = table(tmp_path / "visits.csv", **GROUP, **numbers)
    del spec["classes"]
    doses = get_task(spec).load_checked().train.y
    assert {int(n) for n in doses.isfinite().sum(dim=1)} == {1, 2, 3, 4}


def build(trial):
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("rate", 0.1, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return privtune.Candidate(model, optimizer, max_grad_norm=0.5)


def run(tmp_path, unit, train, validation):
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    budget = privtune.Budget(6.0, 1e-5, name="b", unit=unit)
    study = privtune.create_study("own", budget=budget, storage=storage)
    return study, lambda: study.optimize(
        privtune.make_task(
            build,
            loss=lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="none"),
            train=train,
            validation=validation,
        ),
        strategy=privtune.strategies.PapernotSteinke(mean_runs=2),
        epochs=2,
        expected_batch_size=12,
    )


def test_own_records_are_of_the_budgets_unit_or_refused(tmp_path):
    people, rows = of_units().load(), blobs().load()
    study, go = run(tmp_path, "person", people.train, people.validation)
    go()
    certificate = study.certificate()
    assert [charge["unit"] for charge in certificate["charges"]] == ["person"]
    assert certificate["entries"][1]["body"]["public"]["a record"].startswith(
        "all rows of one person"
    )
    assert "a certain person is in the data" in render_study(study)
    study.close()
    for unit, trained, scored in (
        ("person", rows.train, rows.validation),
        ("person", people.train, rows.validation),
        ("record", people.train, people.validation),
    ):
        (tmp_path / f"{unit}{trained.unit}").mkdir(exist_ok=True)
        study, go = run(tmp_path / f"{unit}{trained.unit}", unit, trained, scored)
        with pytest.raises(privtune.PrivTuneError, match=r"must be like|protects every"):
            go()
        assert study.spent().epsilon == 0.0
        study.close()
