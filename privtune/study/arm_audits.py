"""Audits of a study's arms, stored with its results and included in its budget's certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.ledger import Ledger, LedgerCorruptedError
from privtune.ledger.audits import AUDITS, check_audit, kept_audits, note_audit
from privtune.study.rows import StoredStudy

if TYPE_CHECKING:
    from privtune.study.facade import Study
    from privtune.study.spec import BudgetSpec


def keep_audit(study: Study, report: Mapping[str, Any]) -> None:
    """Store the report of an audit of an arm, so that certificate and report show it.

    What was kept stays, beside what is found later: an audit that contradicts is not forgotten by
    running another. The budget's log notes its digest: a certificate that leaves it out fails.

    Args:
        study: The study.
        report: What ``AuditReport.to_dict`` of :func:`privtune.audit.audit` returned.

    Raises:
        InvalidInputError: If it is not of a plan of this study, at its budget's terms, or says of an
            event what the account does not.

    Example:
        >>> from privtune.audit import audit
        >>> budget = study.spec.budget
        >>> report = audit(study.plans[0], delta=budget.delta, published=budget.epsilon, runs=100)
        >>> keep_audit(study, report.to_dict())
        >>> [record["arm"] for record in audits_of(study)] == [study.plans[0].arm]
        True
    """
    budget = study.spec.budget
    with Ledger(study.storage) as ledger:
        rows = StoredStudy(ledger.log.storage, study.name)
        arm = rows.arm(report.get("arm", ""))
        if arm is None or arm.plan.digest() != report.get("plan"):
            raise InvalidInputError(
                "audit", report.get("arm"), f"is of a plan that study {study.name!r} does not have"
            )
        _check_terms(report, budget)
        # The charge is found by the digest that the study's id is a part of.
        record = {**report, "study": study.name, "plan": arm.digest}
        try:  # what does not hold would spoil every certificate of the budget
            check_audit(record, budget.to_budget())
            text = json.dumps(record, sort_keys=True, allow_nan=False)
        except (LedgerCorruptedError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError("audit", report["arm"], f"is no report ({error!r})") from error
        content = text.encode()
        digest = hashlib.sha256(content).hexdigest()
        # A name of the content: another audit of the arm stands beside it.
        name = f"{report['arm']}-{digest[:16]}.json"
        audits = rows.results.within(AUDITS.rstrip("/"))
        audits.put(name, content)
        note_audit(ledger.log, budget.name, record)


def _check_terms(report: Mapping[str, object], budget: BudgetSpec) -> None:
    """Refuse an audit whose δ, adjacency or published ε are not those of the budget."""
    terms = (report.get("delta"), report.get("adjacency"), report.get("published"))
    if terms == (budget.delta, str(budget.adjacency), budget.epsilon):
        return
    raise InvalidInputError(
        "audit",
        terms,
        f"must be at the budget's delta, adjacency and epsilon: {budget.delta:g}, "
        f"{budget.adjacency}, published={budget.epsilon:g}",
    )


def audits_of(study: Study) -> list[dict[str, object]]:
    """Return the audit reports stored for a ``study``, JSON-ready.

    Example:
        >>> all(record["passed"] for record in audits_of(study))
        True
    """
    with Ledger(study.storage) as ledger:
        return kept_audits(ledger.log.storage, [study.name])
