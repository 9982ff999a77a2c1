"""Audits: empirical lower bounds on the ε of a plan as it runs here, on made-up records."""

from privtune.audit._audit import Audited, AuditReport, audit, estimate
from privtune.audit.bounds import Claim, LowerBound, lower_bound, one_run_bound
from privtune.audit.canaries import Canary
from privtune.audit.laws import Check

__all__ = [
    "AuditReport",
    "Audited",
    "Canary",
    "Check",
    "Claim",
    "LowerBound",
    "audit",
    "estimate",
    "lower_bound",
    "one_run_bound",
]
