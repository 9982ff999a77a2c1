"""Races and crashes. CI runs a short version; the full one with PRIVTUNE_CAMPAIGN=full."""

from __future__ import annotations

import logging
from fractions import Fraction
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.ledger import Admission, Budget, ChargeRequest, Ledger
from privtune.ledger.admission import filter_room
from privtune.ledger.privacy_filter import gaussian_room
from tests.ledger.campaigns import RaceReport, crash, race
from tests.tiers import FULL

LOG = logging.getLogger("campaign")
WORKERS = 40 if FULL else 6
CRASHES = 200 if FULL else 8


@pytest.mark.slow
def test_a_race_under_the_filter(ledger_url: str) -> None:
    """Everybody charges: exactly as much is admitted as the filter holds."""
    with Ledger(ledger_url) as ledger:
        budget = ledger.create_budget(Budget(4.0, 1e-5, name="campaign"))
        [first] = ledger.reserve("campaign", [ChargeRequest(Gaussian(10.0))])
        ledger.start(first.id)
        [beside] = ledger.reserve("campaign", [ChargeRequest(Gaussian(2.5))])
        room, _ = filter_room(ledger.log.current("campaign"))
        total = ledger.filter_state("campaign").capacity
    assert total is not None
    assert budget.order is not None
    sigma = 16.0 if FULL else 8.0
    report = race(ledger_url, workers=WORKERS, sigma=sigma)
    LOG.info(f"{ledger_url.split(':', maxsplit=1)[0]} filter: {_line(report)}")
    weight = budget.order / (2 * sigma**2) * (1 + 1e-12)
    fit = int(room / Fraction(weight))
    assert len(report.admitted) == fit
    _check(report)
    with Ledger(ledger_url) as ledger:
        ledger.void(beside.id)
    late = race(ledger_url, workers=2, sigma=sigma)
    most = int(gaussian_room(budget.order, total - fit * weight) * sigma**2)
    assert len(late.admitted) == most > 1.25 * (total / weight - fit)
    assert len(late.logged) == fit + most


@pytest.mark.slow
def test_a_race_for_a_declaration(ledger_url: str) -> None:
    """The same before anything has started, when the whole block is composed anew every time."""
    with Ledger(ledger_url) as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="campaign", admission=Admission.DECLARED))
    sigma = 5.0
    report = race(ledger_url, workers=WORKERS, sigma=sigma, start=False)
    LOG.info(f"{ledger_url.split(':', maxsplit=1)[0]} declared: {_line(report)}")
    # δ(4) = 1e-5 is met by μ = 0.9232 (closed form), and μ² of n such charges is n/25.
    assert len(report.admitted) == int(0.9232**2 * sigma**2)
    _check(report)


def _check(report: RaceReport) -> None:
    assert report.refused == 3 * report.workers
    assert sorted(report.admitted) == sorted(set(report.admitted)) == sorted(report.logged)
    assert report.longest < 30 or not FULL, "nobody waits for long on a machine of its own"


def _line(report: RaceReport) -> str:
    return (
        f"{report.workers} processes, {len(report.admitted)} admitted, {report.refused} refused, "
        f"{report.seconds:.1f} s, longest call {report.longest:.2f} s"
    )


@pytest.mark.slow
def test_crashes(ledger_url: str, tmp_path: Path) -> None:
    report = crash(ledger_url, tmp_path, crashes=CRASHES, seed=1)
    LOG.info(f"{ledger_url.split(':', maxsplit=1)[0]} crashes: {report}")
    assert report.crashes == CRASHES
    assert len(report.where) >= 3, "the kills did not hit different moments"
