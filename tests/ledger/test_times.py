"""No public time tells how many runs a sealed selection took."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from privtune.accounting import Gaussian
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    certificate,
    export_certificate,
    render_certificate,
)

STUDIES, SECONDS = 30, 37.0


def public_times(text: str) -> list[float]:
    """Everything in a text that can be read as a point in time, in seconds."""
    found = re.findall(
        r"20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:\+00:00|Z)?)?", text
    )
    moments = (datetime.fromisoformat(one) for one in found)
    return [moment.replace(tzinfo=UTC).timestamp() for moment in moments]


def pipeline(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, exact: bool
) -> tuple[list[int], list[float]]:
    """Run studies one after the other, each a budget and a selection of K runs; publish certificates.

    Returns:
        K of each study, and the largest public time that came with it since the one before.
    """
    rng = np.random.default_rng(11)
    now = datetime(2026, 3, 1, 0, 5, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, _zone: object = None) -> datetime:
            return now

    monkeypatch.setattr(certificate, "datetime", Clock)
    runs, times = [], []
    with Ledger(f"sqlite:///{path}", clock=lambda: now) as ledger:
        for number in range(STUDIES):
            name = f"b{number}"
            ledger.create_budget(Budget(4.0, 1e-5, name=name))
            [charge] = ledger.reserve(name, [ChargeRequest(Gaussian(4.0))])
            ledger.start(charge.id)
            runs.append(int(rng.geometric(0.1)))
            now += timedelta(seconds=SECONDS * runs[-1])
            ledger.settle(charge.id)
            found = export_certificate(ledger.log.storage, name)
            if exact:  # as no certificate should say it
                found["exported_at"] = now.isoformat(timespec="seconds")
            times.append(max(public_times(json.dumps(found) + render_certificate(found))))
    return runs, times


def test_k_does_not_follow_from_the_times_of_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty studies of one day as one pipeline; Spearman's correlation, level 1%, one fixed seed.

    The whole pipeline is within a day (30 studies of about ten runs of 37 s), so that a certificate's
    day is one constant; the second half shows that the same test finds exact times.
    """
    runs, times = pipeline(tmp_path / "days.db", monkeypatch, exact=False)
    assert len(set(runs)) > 5
    assert set(np.diff(times)) == {0.0}
    runs, times = pipeline(tmp_path / "exact.db", monkeypatch, exact=True)
    result = stats.spearmanr(runs[1:], np.diff(times))
    assert result.statistic > 0.99
    assert result.pvalue < 0.01
