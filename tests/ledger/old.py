"""Ledgers as older versions of the program left them."""

from __future__ import annotations

from unittest import mock

import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger, migrate
from privtune.ledger import requests as requests_module


def make_hospital(url: str) -> str:
    """Create a ledger with a budget `old` whose unit nothing enforces, as it once was allowed."""
    with (
        mock.patch.object(requests_module, "refuse_other_unit", return_value=None),
        Ledger(url) as ledger,
    ):
        ledger.create_budget(Budget(3.0, 1e-5, name="old", unit="hospital", dataset="clinic"))
        [charge] = ledger.reserve("old", [ChargeRequest(Gaussian(5.0), study="s", arm="a")])
        ledger.start(charge.id)
    return url


def make_old(url: str) -> str:
    """Create a ledger with the first schema, with a budget `campaign` and two charges."""
    with (
        mock.patch.object(migrate, "HEAD", "0001"),
        mock.patch.object(migrate, "metadata", sa.MetaData()),
        mock.patch.object(migrate, "_create", migrate._run),
        Ledger(url) as ledger,
    ):
        ledger.create_budget(Budget(3.0, 1e-5, name="campaign"))
        ledger.reserve("campaign", [ChargeRequest(Gaussian(5.0)), ChargeRequest(Gaussian(6.0))])
    return url
