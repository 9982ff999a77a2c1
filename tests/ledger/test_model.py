"""A ledger against a simple model in memory, under Hypothesis, on both storages.

The model knows Gaussian releases only, whose account is in closed form, and computes the theorem
behind the filter by numerical integration: nothing of it is shared with the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scipy import integrate, optimize, special, stats

from privtune.accounting import Gaussian
from privtune.ledger import (
    Admission,
    Budget,
    BudgetClosedError,
    BudgetExceededError,
    ChargeRequest,
    ChargeStateError,
    DeclarationClosedError,
    Ledger,
    verify,
)
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.tiers import FULL

_NAME = "model"
_FILTER_SHARE = 0.8


@dataclass
class LedgerModel:
    """What a ledger should say, for one budget and Gaussian releases."""

    epsilon: float
    delta: float
    order: float
    declared: bool
    sigmas: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    block: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    started: bool = False
    closed: bool = False

    def excess(self, asked: list[float]) -> float:
        """Return δ of everything with the request, over what is allowed: above 1 is too much."""
        mu = math.sqrt(sum(self.sigmas[i] ** -2 for i in self.block))
        if not self.started:
            mu = math.hypot(mu, *(1 / sigma for sigma in asked))
            return _gaussian_delta(mu, self.epsilon) / self.delta
        there = [
            (i in self.late, state != "settled", sigma**-2)
            for i, (sigma, state) in enumerate(zip(self.sigmas, self.states, strict=True))
            if i not in self.block and state != "voided"
        ]
        new = math.fsum(sigma**-2 for sigma in asked)
        plain = self.order / 2 * math.fsum(v for gaussian, _, v in there if not gaussian)
        late = math.fsum(v for gaussian, _, v in there if gaussian)
        ways = []
        if not late:
            ways.append(plain + self.order / 2 * new)
        if not any(running and not gaussian for gaussian, running, _ in there):
            ways.append(plain + _taken(self.order, late + new))
        spent = min(ways)
        top = self.epsilon - spent + math.log(self.order / (self.order - 1))

        def integrand(t: float) -> float:
            return math.exp(-t) * _gaussian_delta(mu, top - t / (self.order - 1))

        kink = max(0.0, top * (self.order - 1))
        low, _ = integrate.quad(integrand, 0, kink, limit=200, epsabs=1e-14)
        high, _ = integrate.quad(integrand, kink, kink + 60, limit=200, epsabs=1e-14)
        return float(low + high) / (_FILTER_SHARE * self.delta)

    def at_the_edge(self, excess: float) -> float | None:
        """Return the σ of one release with which δ is this part of what is allowed, if any."""
        low, high = 0.05, 1e4
        if not self.excess([high]) < excess < self.excess([low]):
            return None
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.excess([middle]) > excess else (low, middle)
        return high

    def admit(self, asked: list[float], basis: str) -> None:
        """Take in a request that the ledger admitted, on a basis."""
        for sigma in asked:
            if not self.started:
                self.block.add(len(self.sigmas))
            elif basis == "gaussian":
                self.late.add(len(self.sigmas))
            self.sigmas.append(sigma)
            self.states.append("reserved")

    def move(self, index: int, step: str) -> bool:
        """Take a step if it is legal, and return whether it was."""
        legal = {
            "start": ("reserved", "started"),
            "settle": ("started", "settled"),
            "void": ("reserved", "voided"),
        }
        before, after = legal[step]
        if self.states[index] != before:
            return False
        self.states[index] = after
        self.started = self.started or after == "started"
        if after == "voided" and not self.started:
            self.block.discard(index)
        return True


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) of a μ-Gaussian release, for every real ε."""
    if mu == 0:
        return max(0.0, -math.expm1(epsilon))
    first = special.ndtr(mu / 2 - epsilon / mu)
    return float(first - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)))


def _taken(order: float, variance: float) -> float:
    """Return what Gaussian charges take of a filter: the least divergence that converts to no less."""
    if variance == 0:
        return 0.0

    def over(y: float) -> float:
        delta = max(_gaussian_delta(math.sqrt(variance), y), 1e-300)
        return (order - 1) * (y - math.log1p(-1 / order)) + math.log(delta * order)

    low, high = math.log1p(-1 / order), order * variance + 1
    found = optimize.minimize_scalar(lambda y: -over(y), bounds=(low, high), method="bounded")
    return max(0.0, -float(found.fun)) / (order - 1)


class _LedgerMachine(RuleBasedStateMachine):
    """Random interleavings of everything that can be done to a budget."""

    fresh_url: ClassVar[Callable[[], str]]

    @initialize(
        epsilon=st.sampled_from([0.5, 2.0, 6.0]),
        delta=st.sampled_from([1e-6, 1e-3]),
        declared=st.booleans(),
    )
    def create(self, epsilon: float, delta: float, declared: bool) -> None:
        self.url = type(self).fresh_url()
        self.ledger = Ledger(self.url)
        admission = Admission.DECLARED if declared else Admission.ADAPTIVE
        budget = Budget(epsilon, delta, name=_NAME, admission=admission)
        order = self.ledger.create_budget(budget).order
        assert order is not None
        self.model = LedgerModel(epsilon, delta, order, declared)

    @rule(asked=st.lists(st.sampled_from([0.7, 1.0, 2.0, 4.0, 8.0, 16.0]), min_size=1, max_size=3))
    def reserve(self, asked: list[float]) -> None:
        requests = [ChargeRequest(Gaussian(sigma)) for sigma in asked]
        if self.model.closed:
            with pytest.raises(BudgetClosedError):
                self.ledger.reserve(_NAME, requests)
            return
        if self.model.started and self.model.declared:
            with pytest.raises(DeclarationClosedError):
                self.ledger.reserve(_NAME, requests)
            return
        excess = self.model.excess(asked)
        try:
            made = self.ledger.reserve(_NAME, requests)
        except BudgetExceededError:
            # The ledger's table of the profile is a little pessimistic, never optimistic.
            assert excess > 0.96, excess
        else:
            assert excess <= 1 + 1e-6, excess
            self.model.admit(asked, made[0].basis)

    @rule(excess=st.sampled_from([0.96, 1.001]))
    @precondition(lambda self: not self.model.closed)
    @precondition(lambda self: not (self.model.declared and self.model.started))
    def probe(self, excess: float) -> None:
        """Ask for just less, and for just more, than the budget holds."""
        sigma = self.model.at_the_edge(excess)
        if sigma is None:
            return
        requests = [ChargeRequest(Gaussian(sigma))]
        if excess > 1:
            with pytest.raises(BudgetExceededError):
                self.ledger.reserve(_NAME, requests)
        else:
            [made] = self.ledger.reserve(_NAME, requests)
            self.model.admit([sigma], made.basis)
            # Given back, so that there is room for the rest of the run.
            self.ledger.void(made.id)
            self.model.move(len(self.model.sigmas) - 1, "void")

    @rule(data=st.data(), step=st.sampled_from(["start", "settle", "void"]))
    @precondition(lambda self: self.model.sigmas)
    def move(self, data: st.DataObject, step: str) -> None:
        index = data.draw(st.integers(0, len(self.model.sigmas) - 1))
        act = getattr(self.ledger, step)
        if self.model.move(index, step):
            assert act(f"{_NAME}-{index + 1}").state == self.model.states[index]
        else:
            with pytest.raises(ChargeStateError):
                act(f"{_NAME}-{index + 1}")

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.url)

    @rule()
    @precondition(lambda self: len(self.model.sigmas) > 3)
    def close_budget(self) -> None:
        self.ledger.close_budget(_NAME)
        self.model.closed = True

    @invariant()
    def agrees(self) -> None:
        charges = self.ledger.charges(_NAME)
        assert [charge.event for charge in charges] == [Gaussian(s) for s in self.model.sigmas]
        assert [str(charge.state) for charge in charges] == self.model.states
        spent = self.ledger.spent(_NAME).epsilon
        assert 0 <= spent <= self.model.epsilon
        assert self.ledger.remaining(_NAME) == self.model.epsilon - spent

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            verify(self.ledger.log.storage, _NAME)
            self.ledger.close()


def test_sqlite_agrees_with_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fresh() -> str:
        return f"sqlite:///{tmp_path_factory.mktemp('model')}/ledger.db"

    _run(fresh, examples=25 if FULL else 8)


@pytest.mark.postgres
@pytest.mark.skipif(not POSTGRES, reason="PRIVTUNE_TEST_POSTGRES_URL is not set")
def test_postgres_agrees_with_the_model() -> None:
    with PostgresSchemas() as schemas:
        _run(schemas.fresh, examples=10 if FULL else 3)


def _run(fresh_url: Callable[[], str], examples: int) -> None:
    run_state_machine_as_test(
        type("LedgerMachine", (_LedgerMachine,), {"fresh_url": staticmethod(fresh_url)}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # shrinking a run takes minutes, and tells little more
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_model_refuses_what_it_should() -> None:
    """The oracle itself: a Gaussian of known δ, and the filter of an empty block."""
    model = LedgerModel(1.0, 0.1269, 5.0, declared=False)
    assert model.excess([1.0]) == pytest.approx(0.12693674 / 0.1269, rel=1e-6)
    model.started = True
    # Canonne, Kamath & Steinke: ε = B + log(1 − 1/α) − log(δ α)/(α − 1).
    spent = 1.0 - math.log(0.8) + math.log(0.8 * 0.1269 * 5.0) / 4.0
    model.sigmas, model.states = [1e9], ["started"]
    assert model.excess([math.sqrt(2.5 / spent)]) == pytest.approx(1.0, rel=1e-6)
    # With nothing open: the least divergence whose conversion is nowhere below the Gaussian profile.
    model.states = ["settled"]
    at = np.linspace(math.log(0.8), 4.0, 40_001)
    profile = stats.norm.cdf(0.25 - 2 * at) - np.exp(at) * stats.norm.cdf(-0.25 - 2 * at)
    taken = float(np.max(at + np.log(profile * 5.0) / 4.0 - math.log(0.8)))
    assert taken < 2.5 * 0.5**2
    found = 0.8**4 / 5 * math.exp(4 * (taken - 1.0)) / (0.8 * 0.1269)
    assert model.excess([2.0]) == pytest.approx(found, rel=1e-5)
