"""Random interleavings against the shipped model, on both storages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from scipy import stats

from privtune.testing.ledger_model import LedgerModel, ledger_machine
from tests.ledger.conftest import POSTGRES, PostgresSchemas


def test_sqlite_agrees_with_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fresh() -> str:
        return f"sqlite:///{tmp_path_factory.mktemp('model')}/ledger.db"

    _run(ledger_machine(fresh), examples=25)


@pytest.mark.postgres
@pytest.mark.skipif(not POSTGRES, reason="PRIVTUNE_TEST_POSTGRES_URL is not set")
def test_postgres_agrees_with_the_model() -> None:
    with PostgresSchemas() as schemas:
        _run(ledger_machine(schemas.fresh), examples=10)


def _run(machine: type, examples: int) -> None:
    run_state_machine_as_test(
        machine,
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
