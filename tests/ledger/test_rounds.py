"""Rounds: one charge, K rows, one result each, whoever dies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian, epsilon
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Budget,
    ChargeRequest,
    ChargeStateError,
    Ledger,
    RoundNotFinishedError,
    RoundStuckError,
)
from privtune.ledger.history import History
from privtune.ledger.rounds import SKIPPED, Lease, OpenRound, Rounds, Submission, leased
from privtune.ledger.schema import tasks
from tests.ledger.conftest import complete_one, lease_one, renew_one

pytestmark = pytest.mark.quick


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with Ledger(ledger_url) as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rounds(ledger: Ledger, clock: Clock) -> Rounds:
    return Rounds(ledger, lease_seconds=10, max_attempts=3, clock=clock)


def leased_one(rounds: Rounds, charge_id: str, worker: str) -> Lease:
    [lease] = rounds.lease_some(charge_id, worker, most=1)
    return lease


ASKED = ChargeRequest(Gaussian(4.0), study="s", arm="selection")
Begin = Callable[..., OpenRound]


@pytest.fixture
def begin(ledger: Ledger, rounds: Rounds) -> Begin:
    """Reserve a charge and open its round, as an arm does."""

    def begun(count: int, asked: ChargeRequest = ASKED) -> OpenRound:
        [charge] = ledger.reserve("b", [asked])
        return rounds.open(charge.id, count=count)

    return begun


def test_a_settled_round_is_over(ledger: Ledger, rounds: Rounds, begin: Begin) -> None:
    """Whoever comes late finds its results gone: that is no reason to train them again."""
    opened = begin(1)
    [lease] = rounds.lease_some(opened.charge_id, "w", most=1)
    rounds.complete_some([Submission(lease, 0.5, {})])
    ledger.settle(opened.charge_id)
    with pytest.raises(ChargeStateError, match="its round is over"):
        rounds.reopen(opened.charge_id, 0, lambda _: None)
    assert rounds.open_count(opened.charge_id) == 0
    over = rounds.find(opened.charge_id)
    assert over is not None
    with pytest.raises(ChargeStateError, match="its round is over"):
        over.seed(0)


def test_the_number_of_trials_is_never_drawn_twice(ledger: Ledger, rounds: Rounds) -> None:
    [charge] = ledger.reserve("b", [ASKED])
    first = rounds.open(charge.id, count=5)
    assert [(c.id, c.state) for c in ledger.charges("b")] == [(charge.id, "started")]
    assert ledger.log.current("b").seq == 3, "neither K nor a result reaches the chain"
    again = rounds.open(charge.id, count=50)
    assert (again, again.secret) == (first, first.secret)
    assert rounds.open_count(charge.id) == 5


def test_a_round_needs_its_charge(ledger: Ledger, rounds: Rounds) -> None:
    voided, started = ledger.reserve("b", [ASKED, ChargeRequest(Gaussian(9.0))])
    ledger.void(voided.id)
    ledger.start(started.id)
    for charge in (voided, started):
        with pytest.raises(ChargeStateError):
            rounds.open(charge.id, count=2)
        assert rounds.find(charge.id) is None


def test_leases_are_exclusive_until_they_expire(
    ledger: Ledger, rounds: Rounds, clock: Clock, begin: Begin
) -> None:
    charge_id = begin(2).charge_id
    first, second = leased_one(rounds, charge_id, "w1"), leased_one(rounds, charge_id, "w2")
    assert {first.number, second.number} == {0, 1}
    assert lease_one(rounds, charge_id, "w3") is None
    clock.now += 9
    assert renew_one(rounds, first) is not None
    clock.now += 5  # the second lease is over, the first was renewed
    taken = leased_one(rounds, charge_id, "w3")
    assert (taken.number, taken.attempt, taken.seed) == (second.number, 2, second.seed)
    assert renew_one(rounds, second) is None
    assert len(ledger.charges("b")) == 1


@pytest.mark.parametrize("back", [5, 15, 86_400, 1e9])
def test_nobody_waits_for_long_when_the_clock_is_set_back(
    rounds: Rounds, clock: Clock, back: float, begin: Begin
) -> None:
    charge_id, waited = begin(2).charge_id, 0.0
    for _ in range(2):
        assert lease_one(rounds, charge_id, "dead") is not None
    clock.now -= back
    for _ in range(2):
        while lease_one(rounds, charge_id, "next") is None:
            clock.now += 0.5
            waited += 0.5
    assert waited <= 2 * 10


@pytest.mark.parametrize("back", [2, 86_400])
def test_whoever_renews_keeps_its_lease_when_the_clock_is_set_back(
    rounds: Rounds, clock: Clock, back: float, begin: Begin
) -> None:
    charge_id = begin(1).charge_id
    lease = lease_one(rounds, charge_id, "alive")
    clock.now -= back
    for _ in range(4):
        assert lease is not None
        lease = renew_one(rounds, lease)
        clock.now += 3
        assert lease_one(rounds, charge_id, "next") is None


def test_whoever_comes_first_leases_its_share_and_no_more(
    rounds: Rounds, clock: Clock, begin: Begin
) -> None:
    charge_id = begin(10).charge_id
    first = rounds.lease_some(charge_id, "a", most=16, workers=2)
    assert [lease.number for lease in first] == [0, 1, 2, 3, 4]
    assert len({lease.seed for lease in first}) == 5
    second = rounds.lease_some(charge_id, "b", most=16)  # sees one at work: half of what is free
    assert [lease.number for lease in second] == [5, 6, 7]
    assert len(rounds.lease_some(charge_id, "c", most=16)) == 1
    assert len(rounds.lease_some(charge_id, "c", most=16)) == 1, "the last is for who asks"
    assert rounds.lease_some(charge_id, "d", most=16) == ()
    clock.now += 60
    assert len(rounds.lease_some(charge_id, "d", most=16)) == 10, "dead workers share nothing"


def test_the_first_result_stays(rounds: Rounds, clock: Clock, begin: Begin) -> None:
    charge_id = begin(1).charge_id
    slow = leased_one(rounds, charge_id, "slow")
    clock.now += 11
    fast = leased_one(rounds, charge_id, "fast")
    assert complete_one(rounds, fast, 0.5, {"by": "fast"})
    assert not complete_one(rounds, slow, 0.9, {"by": "slow"})
    assert lease_one(rounds, charge_id, "w") is None
    [result] = rounds.results(charge_id)
    assert (result.score, result.result) == (0.5, {"by": "fast"})


def test_no_early_look(rounds: Rounds, begin: Begin) -> None:
    charge_id = begin(2).charge_id
    lease = leased_one(rounds, charge_id, "w")
    complete_one(rounds, lease, 1.0, {})
    with pytest.raises(RoundNotFinishedError):
        rounds.results(charge_id)


def test_a_score_that_is_not_a_number_is_the_worst(rounds: Rounds, begin: Begin) -> None:
    charge_id = begin(3).charge_id
    leases = [lease_one(rounds, charge_id, "w") for _ in range(3)]
    assert all(leases)
    complete_one(rounds, leases[0], -math.inf, {})
    complete_one(rounds, leases[1], math.nan, {})
    complete_one(rounds, leases[2], 0.3, {})
    scores = [result.score for result in rounds.results(charge_id)]
    assert scores == [-math.inf, -math.inf, 0.3]


def test_a_task_that_kills_its_workers_stops_the_round_and_is_no_result(
    rounds: Rounds, clock: Clock, begin: Begin
) -> None:
    charge_id = begin(2).charge_id
    seeds = set()
    for attempt in (1, 2, 3):
        lease = leased_one(rounds, charge_id, "w")
        assert (lease.number, lease.attempt) == (0, attempt)
        seeds.add(lease.seed)
        clock.now += 11
    with pytest.raises(RoundStuckError, match="it goes on where it was"):
        lease_one(rounds, charge_id, "w")
    assert rounds.open_count(charge_id) == 2
    # Whoever opens the round again has seen to it: the same task goes on with the same seed.
    rounds.open(charge_id, count=99)
    lease = leased_one(rounds, charge_id, "w")
    assert (lease.number, lease.attempt, {lease.seed}) == (0, 1, seeds)
    rounds.open(charge_id, count=99)
    assert renew_one(rounds, lease) is not None, "what somebody works on is left alone"


def test_no_trial_at_all(rounds: Rounds, begin: Begin) -> None:
    """K = 0 must be allowed to happen: redrawing would be another law."""
    charge_id = begin(0).charge_id
    assert lease_one(rounds, charge_id, "w") is None
    assert rounds.results(charge_id) == ()


def test_seeds_are_secret_and_fixed(rounds: Rounds, begin: Begin) -> None:
    one = begin(7)
    other = begin(7, ChargeRequest(Gaussian(9.0)))
    seeds = [one.seed(n) for n in range(7)]
    assert len(set(seeds)) == len(seeds)
    assert one.seed(0) != other.seed(0)
    assert "7" not in repr(one)
    lease = leased_one(rounds, one.charge_id, "w")
    assert lease.seed == one.seed(lease.number)
    assert lease.seed.hex() not in repr(lease)


@pytest.mark.parametrize("count", [-1, 1.5, True, 10**7])
def test_a_wrong_count_is_refused_without_being_told(
    rounds: Rounds, count: int, begin: Begin
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        begin(count)
    assert repr(count) not in str(caught.value)


def test_a_result_can_end_its_round_and_leaves_the_rows_before_it_open(
    rounds: Rounds, begin: Begin
) -> None:
    charge = begin(6).charge_id
    leases = [lease_one(rounds, charge, "a") for _ in range(4)]
    assert all(lease is not None for lease in leases)
    assert complete_one(rounds, leases[2], 0.9, {}, last=True)
    assert rounds.open_count(charge) == 2, "rows 0 and 1 still decide who is the first"
    assert not complete_one(rounds, leases[3], 0.99, {}, last=True), "too late: its row is closed"
    assert renew_one(rounds, leases[3]) is None
    assert lease_one(rounds, charge, "b") is None
    with pytest.raises(RoundNotFinishedError):
        rounds.results(charge)
    assert complete_one(rounds, leases[1], 0.8, {}, last=True)
    assert complete_one(rounds, leases[0], 0.1, {})
    results = rounds.results(charge)
    assert [SKIPPED in r.result for r in results] == [False] * 3 + [True] * 3
    assert [r.score for r in results[:3]] == [0.1, 0.8, 0.9]
    assert all(r.score == -math.inf for r in results[3:])


def test_a_plan_that_somebody_charges_meanwhile_is_not_refused(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan takes the whole budget: who asks for the same one gets the charge that is there."""
    asked = [ChargeRequest(Gaussian(_whole(ledger)), plan_digest="same")]
    current, there = ledger.log.current, []

    def overtaken(budget: str) -> History:
        found = current(budget)
        monkeypatch.setattr(ledger.log, "current", current)
        with Ledger(ledger_url) as other:
            there.extend(other.reserve("b", asked))
        return found

    monkeypatch.setattr(ledger.log, "current", overtaken)
    assert list(ledger.reserve("b", asked)) == there
    assert len(ledger.charges("b")) == 1


def _whole(ledger: Ledger) -> float:
    """Return the noise multiplier of a release that fits once and not twice."""
    budget = ledger.budget("b")
    sigma = 0.1
    while epsilon(Gaussian(sigma), budget.delta).epsilon > 0.9 * budget.epsilon:
        sigma *= 1.1
    return sigma


def test_leases_do_not_wait_for_the_disk_and_all_else_does(
    ledger: Ledger, rounds: Rounds, begin: Begin
) -> None:
    charge_id, storage = begin(4).charge_id, ledger.log.storage
    sqlite = storage.dialect == "sqlite"
    ask = sa.text("PRAGMA synchronous" if sqlite else "SHOW synchronous_commit")
    unwaited, waited = (1, 2) if sqlite else ("off", "on")
    seen: list[object] = []
    lease = leased_one(rounds, charge_id, "w")
    assert complete_one(
        rounds,
        lease,
        0.5,
        {},
        keep=lambda connection: seen.append(connection.execute(ask).scalar_one()),
    )
    assert lease_one(rounds, charge_id, "w") is not None
    with storage.write() as connection:
        seen.append(connection.execute(ask).scalar_one())
    assert seen == [waited, waited], "after a lease, too"
    with storage.quick() if sqlite else storage.write() as connection:
        statement = sa.update(tasks).where(tasks.c.number == 3).values(worker="w")
        leased(connection, statement)
        assert connection.execute(ask).scalar_one() == unwaited


def test_a_lease_looks_at_no_more_rows_late_in_a_long_round(sqlite_url: str) -> None:
    """Counted in the instructions of SQLite's machine, which no clock changes."""
    with Ledger(sqlite_url) as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="clinic"))
        steps: list[int] = []

        def count(connection: Any, *_: object) -> None:
            connection.set_progress_handler(lambda: steps.append(1), 1)

        sa.event.listen(ledger.log.storage.engine, "checkout", count)
        rounds = Rounds(ledger)
        [charge] = ledger.reserve("clinic", [ChargeRequest(Gaussian(20.0))])
        charge_id = rounds.open(charge.id, count=2000).charge_id

        def cost() -> int:
            """The most of 60 leases, but for the few at which SQLite tidies up."""
            costs = []
            for _ in range(60):
                steps.clear()
                lease = lease_one(rounds, charge_id, "w")
                costs.append(len(steps))
                assert lease is not None
                complete_one(rounds, lease, 0.5, {})
            return sorted(costs)[55]

        early = cost()
        with ledger.log.storage.write() as connection:
            ended = sa.update(tasks).where(tasks.c.number < 1900)
            connection.execute(ended.values(done=1, result="{}"))
        assert cost() < 1.5 * early


def test_results_of_one_moment_are_one_transaction(
    rounds: Rounds, clock: Clock, begin: Begin
) -> None:
    charge = begin(4).charge_id
    late = rounds.lease_some(charge, "late", most=4)
    clock.now += 11
    [fast] = rounds.lease_some(charge, "fast", most=1)
    assert complete_one(rounds, fast, 0.5, {"by": "fast"})
    kept: list[int] = []

    def handed(fail: int | None = None) -> list[Submission]:
        def keep(number: int) -> None:
            if number == fail:
                raise OSError("the disk is full")
            kept.append(number)

        return [
            Submission(
                lease, 0.1 * lease.number, {"by": "late"}, keep=lambda _, n=lease.number: keep(n)
            )
            for lease in reversed(late)
        ]

    with pytest.raises(OSError, match="full"):
        rounds.complete_some(handed(fail=3))
    assert rounds.open_count(charge) == 3, "all of them or none"
    kept.clear()
    assert rounds.complete_some(handed()) == {1, 2, 3}, "the first result of row 0 stays"
    assert kept == [1, 2, 3], "in the order in which rows are locked; nothing of what came second"
    assert rounds.complete_some(handed()) == frozenset()
    results = rounds.results(charge)
    assert [r.result["by"] for r in results] == ["fast", "late", "late", "late"]
