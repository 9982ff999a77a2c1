"""Audits of a study's arms, kept beside its results: the certificate of its budget carries them."""

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
    from privtune.study._study import Study


def keep_audit(study: Study, report: Mapping[str, Any]) -> None:
    """Keep what an audit of an arm found, so that certificate and report say it.

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
        stored = StoredStudy(ledger.log.storage, study.name)
        arm = stored.arm(report.get("arm", ""))
        if arm is None or arm.plan.digest() != report.get("plan"):
            raise InvalidInputError(
                "audit", report.get("arm"), f"is of a plan that study {study.name!r} does not have"
            )
        asked = tuple(report.get(name) for name in ("delta", "adjacency", "published"))
        if asked != (budget.delta, str(budget.adjacency), budget.epsilon):
            raise InvalidInputError(
                "audit",
                asked,
                f"must be at the budget's delta, adjacency and epsilon: {budget.delta:g}, "
                f"{budget.adjacency}, published={budget.epsilon:g}",
            )
        # The charge is found by the digest that the study's id is a part of.
        kept = {**report, "study": study.name, "plan": arm.digest}
        try:  # what does not hold would spoil every certificate of the budget
            check_audit(kept, budget.to_budget())
            record = json.dumps(kept, sort_keys=True, allow_nan=False)
        except (LedgerCorruptedError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError("audit", report["arm"], f"is no report ({error!r})") from error
        name = f"{report['arm']}-{hashlib.sha256(record.encode()).hexdigest()[:16]}.json"
        stored.results.within(AUDITS.rstrip("/")).put(name, record.encode())
        note_audit(ledger.log, budget.name, kept)


def audits_of(study: Study) -> list[dict[str, Any]]:
    """Return the audits that a ``study`` keeps, ready for JSON.

    Example:
        >>> all(record["passed"] for record in audits_of(study))
        True
    """
    with Ledger(study.storage) as ledger:
        return kept_audits(ledger.log.storage, [study.name])
