"""What each transition in an arm's life must have done before the next one begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.execution.executor import Executor
from privtune.execution.table import make_rounds
from privtune.ledger import LedgerCorruptedError, verify
from privtune.ledger.rounds import OpenRound
from privtune.ledger.schema import tasks
from privtune.study import Observer, Study
from privtune.study.lifecycle import Life, carry_on, new_arm
from privtune.study.run import TaskTrainer
from privtune.training.mechanism.streams import Streams
from tests.ledger.conftest import lease_one
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.quick

MADE_UP = 1234.5  # seconds


@pytest.fixture
def life(storage: str) -> Iterator[Life]:
    Study.create(toy_spec(seed=1), storage).close()
    with closing(Life("toy", storage)) as opened:
        yield opened


@dataclass
class Watching:
    """A trainer that notes how far each arm's charge is when its code is given the data."""

    life: Life
    trainer: TaskTrainer
    seen: dict[str, str] = field(default_factory=dict)

    def rehearse(self, plan: Any) -> float:
        self.trainer.rehearse(plan)
        return MADE_UP

    def prepare(self, plan: Any) -> Any:
        self.seen[plan.arm] = str(self.life.charges()[plan.arm].state)
        return self.trainer.prepare(plan)

    def finish(self, plan: Any, outcome: Any, repetition: int) -> Any:
        return self.trainer.finish(plan, outcome, repetition)

    @property
    def device(self) -> str:
        return self.trainer.device

    @property
    def shows_output(self) -> bool:
        return self.trainer.shows_output


def test_every_arm_trains_on_a_started_charge_and_none_shows_its_time(life: Life) -> None:
    task = life.spec.load_task()
    said: list[str] = []
    trainer = TaskTrainer(life, task, Observer(), life.spec.placement, Executor(), said.append)
    watching = Watching(life, trainer)
    plans = [arm.plan for arm in life.arms().values()]
    releases = carry_on(life, plans, watching, Observer())
    assert watching.seen == {plan.arm: "started" for plan in plans}
    for plan, release in zip(plans, releases, strict=True):
        # What an arm took tells how many records there are, and a sealed one how many runs it made:
        # its rehearsal, on made-up records, is all that is known.
        assert release.cost.cpu_seconds == MADE_UP, plan.arm
    assert {plan.is_sealed for plan in plans} == {True, False}
    assert not said, "it waits for nobody"


def test_a_round_has_the_rows_that_were_drawn_and_the_seeds_of_its_arm(life: Life) -> None:
    """K comes from the plan's law, and rows, seeds and K from the arm's own secret."""
    plans = [arm.plan for arm in life.arms().values()]
    (plan,) = (plan for plan in plans if plan.runs is not None)
    life.charge(plans)
    life.start(plan)
    charge, secret = life.charge_of(plan), life.secret(plan)
    assert charge is not None
    count = plan.runs.sample(Streams(secret).numpy("runs", 0))
    rounds = make_rounds(life.ledger)
    assert rounds.find(charge.id) == OpenRound(charge.id, count, secret)
    with life.ledger.log.storage.read() as connection:
        rows = connection.execute(sa.select(tasks.c.number).order_by(tasks.c.number)).all()
    assert [row.number for row in rows] == list(range(count))
    leases = [lease_one(rounds, charge.id, "w") for _ in range(count)]
    for number, lease in enumerate(leases):
        assert lease is not None
        assert lease.seed == Streams(secret).key("trial", number)
    assert lease_one(rounds, charge.id, "w") is None


@pytest.fixture
def ran(storage: str) -> Iterator[Life]:
    """The life of a study whose only arm is a selection that has been run."""
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4}
    with closing(Study.create(toy_spec(arms=[arm], epochs=1, seed=1), storage)) as study:
        study.run()
    with closing(Life("toy", storage)) as opened:
        yield opened


def test_the_secret_of_a_round_is_forgotten_with_its_arms(ran: Life) -> None:
    found = [make_rounds(ran.ledger).find(charge.id) for charge in ran.charges().values()]
    assert [each and each.secret for each in found] == [b""]


@pytest.mark.parametrize("change", [{"score": 0.25}, {"result": "{}"}])
def test_the_chain_covers_the_results_of_an_arms_round(ran: Life, change: dict[str, Any]) -> None:
    """However an arm's life settles its charge, what its round held cannot be changed unseen."""
    log = ran.ledger.log.storage
    verify(log, "toy")
    with log.write() as connection:
        assert connection.execute(sa.update(tasks).values(change)).rowcount > 0
    with pytest.raises(LedgerCorruptedError, match="the round of charge toy-1"):
        verify(log, "toy")


@pytest.mark.parametrize("seed", [None, 7])
def test_every_arm_has_a_secret_of_its_own(life: Life, seed: int | None) -> None:
    spec = life.spec.model_copy(update={"seed": seed})
    plans = [arm.plan for arm in life.arms().values()]
    first, again = ([new_arm(spec, life.row, plan).secret for plan in plans] for _ in range(2))
    assert len({*first}) == len(plans)
    assert (first == again) is (seed is not None)
