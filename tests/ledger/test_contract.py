"""What every ledger must do, on both storages: the fixture `ledger_url` gives an empty one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from privtune.accounting import Adjacency, ApproximateDP, Composed, Event, Gaussian, NonPrivate
from privtune.accounting import epsilon as epsilon_of
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Budget,
    BudgetClosedError,
    BudgetExceededError,
    BudgetExistsError,
    Charge,
    ChargeRequest,
    ChargeStateError,
    DeclarationClosedError,
    Ledger,
    UnknownBudgetError,
    UnknownChargeError,
)


def request(sigma: float, **fields: Any) -> ChargeRequest:
    return ChargeRequest(Gaussian(sigma), **fields)


class TestLedger:
    @pytest.fixture
    def ledger(self, ledger_url: str) -> Iterator[Ledger]:
        """Open a ledger with one adaptive budget ``b`` of (3, 1e-5)."""
        with Ledger(ledger_url) as opened:
            opened.create_budget(Budget(3.0, 1e-5, name="b"))
            yield opened

    @pytest.fixture
    def running(self, ledger: Ledger) -> Ledger:
        """Return the ledger after the budget's first start, when the filter is in force."""
        [first] = ledger.reserve("b", [request(8.0)])
        ledger.start(first.id)
        return ledger

    def test_a_budget_is_what_was_asked(self, ledger: Ledger) -> None:
        asked = Budget(1.0, 1e-6, name="c", adjacency=Adjacency.REPLACE_ONE, dataset="clinic")
        made = ledger.create_budget(asked)
        assert ledger.budget("c") == made == ledger.create_budget(asked)
        assert made.to_dict() | {"order": None} == asked.to_dict()
        assert [budget.name for budget in ledger.budgets()] == ["b", "c"]

    def test_a_budget_never_changes(self, ledger: Ledger) -> None:
        with pytest.raises(BudgetExistsError, match=r"epsilon is 3\.0, not 4\.0"):
            ledger.create_budget(Budget(4.0, 1e-5, name="b"))

    def test_an_order_is_one_of_the_filters(self, ledger: Ledger) -> None:
        assert ledger.create_budget(Budget(1.0, 1e-6, name="c", order=6.3)).order == 6.3
        with pytest.raises(InvalidInputError, match=r"nearest is 6\.3"):
            ledger.create_budget(Budget(1.0, 1e-6, name="d", order=6.26))

    def test_unknown_names_are_errors(self, ledger: Ledger) -> None:
        with pytest.raises(UnknownBudgetError):
            ledger.spent("nobody")
        with pytest.raises(UnknownChargeError):
            ledger.start("b-7")
        with pytest.raises(InvalidInputError):
            ledger.start("seven")
        with pytest.raises(InvalidInputError):
            ledger.reserve("b", [])

    def test_a_charge_runs_its_course(self, ledger: Ledger) -> None:
        asked = request(2.0, study="s", arm="a", note="ñ \n line", plan_digest="d" * 64)
        [made] = ledger.reserve("b", [asked])
        assert (made.id, made.state, made.event) == ("b-1", "reserved", asked.event)
        started = ledger.start(made.id)
        settled = ledger.settle(made.id, transcript_digest="abc")
        assert (started.state, settled.state) == ("started", "settled")
        with Ledger(ledger.log.storage.url.render_as_string(hide_password=False)) as other:
            [read] = other.charges("b")
        assert read == settled == ledger.charge("b-1")
        assert (read.study, read.arm, read.note) == ("s", "a", "ñ \n line")
        assert (read.plan_digest, read.transcript_digest) == ("d" * 64, "abc")
        assert read.started_at is not None
        assert read.closed_at is not None
        assert read.created_at <= read.started_at <= read.closed_at

    def test_a_plan_is_charged_once_and_for_one_event(self, ledger: Ledger) -> None:
        plan, louder = request(5.0, plan_digest="p"), request(2.0, plan_digest="p")
        [made] = ledger.reserve("b", [plan])
        assert ledger.reserve("b", [plan, plan]) == (made, made)
        for asked in ([louder], [replace(plan, plan_digest="q"), replace(louder, plan_digest="q")]):
            with pytest.raises(ChargeStateError, match="another event"):
                ledger.reserve("b", asked)
        ledger.start(made.id)
        with pytest.raises(ChargeStateError, match="another event"):
            ledger.reserve("b", [louder])
        assert len(ledger.charges("b")) == 1

    def test_all_or_nothing(self, ledger: Ledger) -> None:
        with pytest.raises(BudgetExceededError):
            ledger.reserve("b", [request(5.0), request(5.0), request(0.5)])
        assert ledger.charges("b") == ()
        made = ledger.reserve("b", [request(5.0), request(6.0)])
        assert [charge.id for charge in made] == ["b-1", "b-2"]

    def test_declared_charges_compose_by_the_best_bound(self, ledger: Ledger) -> None:
        events = (Gaussian(2.5), Gaussian(2.0))
        ledger.reserve("b", [ChargeRequest(event) for event in events])
        expected = epsilon_of(Composed(events), 1e-5).epsilon
        assert ledger.spent("b").epsilon == expected
        assert ledger.remaining("b") == 3.0 - expected

    def test_voided_after_the_first_start_stays_in_the_block(self, ledger: Ledger) -> None:
        made = ledger.reserve("b", [request(2.5), request(5.0)])
        ledger.start(made[1].id)
        before = ledger.spent("b")
        ledger.void(made[0].id)
        assert ledger.spent("b") == before

    def test_a_started_charge_stays_spent(self, running: Ledger) -> None:
        [made] = running.reserve("b", [_largest(running)])
        running.start(made.id)
        with pytest.raises(ChargeStateError):
            running.void(made.id)
        with pytest.raises(BudgetExceededError):
            running.reserve("b", [request(9.0)])

    def test_the_filter_takes_over_after_the_first_start(self, running: Ledger) -> None:
        [later] = running.reserve("b", [request(8.0)])
        assert [charge.basis for charge in running.charges("b")] == ["declared", "filter"]
        assert later.state == "reserved"
        assert 0 < running.spent("b").epsilon <= 3.0
        with pytest.raises(BudgetExceededError, match=r"What fits"):
            running.reserve("b", [request(0.9)])

    def test_a_declared_budget_is_closed_by_its_first_start(self, ledger: Ledger) -> None:
        ledger.create_budget(Budget(3.0, 1e-5, name="d", admission="declared"))  # type: ignore[arg-type]
        made = ledger.reserve("d", [request(5.0)])
        made += ledger.reserve("d", [request(5.0)])
        ledger.start(made[0].id)
        with pytest.raises(DeclarationClosedError):
            ledger.reserve("d", [request(50.0)])
        ledger.start(made[1].id)

    def test_no_event_without_a_guarantee(self, ledger: Ledger, running: Ledger) -> None:
        ledger.create_budget(Budget(3.0, 1e-5, name="c"))
        for name in ("b", "c"):
            with pytest.raises(BudgetExceededError):
                ledger.reserve(name, [ChargeRequest(NonPrivate())])

    def test_approximate_dp_passes_the_filter_up_to_its_share(self, running: Ledger) -> None:
        running.reserve("b", [ChargeRequest(ApproximateDP(0.1, 0.9e-6))])
        with pytest.raises(BudgetExceededError):
            running.reserve("b", [ChargeRequest(ApproximateDP(0.1, 0.2e-6))])
        running.reserve("b", [request(20.0)])
        assert running.spent("b").epsilon <= 3.0

    @pytest.mark.parametrize("event", [Gaussian(0.1), NonPrivate(), ApproximateDP(9.0, 1e-3)])
    def test_what_has_happened_is_recorded(self, running: Ledger, event: Event) -> None:
        made = running.record("b", ChargeRequest(event, note="press release"))
        assert (made.state, made.basis) == ("settled", "recorded")
        assert running.spent("b").epsilon > 3.0
        assert running.remaining("b") == 0.0
        with pytest.raises(BudgetExceededError):
            running.reserve("b", [request(100.0)])

    def test_a_closed_budget_admits_nothing(self, ledger: Ledger) -> None:
        [made] = ledger.reserve("b", [request(5.0)])
        ledger.close_budget("b")
        ledger.close_budget("b")
        assert ledger.is_closed("b")
        with pytest.raises(BudgetClosedError):
            ledger.reserve("b", [request(50.0)])
        ledger.settle(ledger.start(made.id).id)

    def test_charges_can_be_told_apart(self, ledger: Ledger) -> None:
        ledger.reserve("b", [request(9.0, study="s", arm="x"), request(9.0, study="s", arm="y")])
        ledger.reserve("b", [request(9.0, study="t", arm="x")])
        assert [charge.id for charge in ledger.charges("b", study="s")] == ["b-1", "b-2"]
        assert [charge.id for charge in ledger.charges("b", study="s", arm="y")] == ["b-2"]

    def test_threads_share_a_ledger(self, running: Ledger) -> None:
        made: list[Charge] = []

        def work() -> None:
            while True:
                try:
                    made.extend(running.reserve("b", [request(9.0)]))
                except BudgetExceededError:
                    return

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({charge.id for charge in made}) == len(made) == len(running.charges("b")) - 1
        with pytest.raises(BudgetExceededError):
            running.reserve("b", [request(9.0)])


def _largest(ledger: Ledger) -> ChargeRequest:
    """Return a request that the filter of budget ``b`` admits, with next to nothing left."""
    low, high = 0.5, 50.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        try:
            ledger.void(ledger.reserve("b", [request(middle)])[0].id)
            high = middle
        except BudgetExceededError:
            low = middle
    return request(high)
