"""Audits: empirical lower bounds on the ε of a plan, from trainings on made-up records."""

from privtune.audit._examination import AuditReport, AuditRow, audit, estimate
from privtune.audit.bounds import Claim, LowerBound, lower_bound, one_run_bound
from privtune.audit.canaries import Canary
from privtune.audit.machinery_laws import LawCheck

__all__ = [
    "AuditReport",
    "AuditRow",
    "Canary",
    "Claim",
    "LawCheck",
    "LowerBound",
    "audit",
    "estimate",
    "lower_bound",
    "one_run_bound",
]
