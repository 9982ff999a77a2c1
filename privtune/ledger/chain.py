"""The log's entries and the hash chain that ties each to the one before.

An entry has a public part and a sealed part. The chain covers the public part and a salted digest
of the sealed part, so that a certificate can show the whole chain without the times at which a
sealed round began and ended (they tell how many trials it took), while the curator, who has the
sealed parts, can still prove them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

ENTRY_VERSION = 1
"""Version of the entry's layout; it is hashed with every entry."""

GENESIS = "0" * 64
"""What the first entry of a budget names as its predecessor."""

Document = Mapping[str, Any]
"""Values by name, ready for JSON: an entry's body, a certificate, the record of an audit."""


class Kind(StrEnum):
    """The kind of a log entry: what happened to a budget or to a charge."""

    CREATED = "created"
    RESERVED = "reserved"
    STARTED = "started"
    SETTLED = "settled"
    VOIDED = "voided"
    CLOSED = "closed"
    AUDITED = "audited"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a budget's log."""

    budget: str
    seq: int
    kind: str
    charge: int
    body: str
    sealed: str
    previous: str
    hash: str

    def computed_hash(self) -> str:
        """Return the SHA-256 of the entry's fields, with the hash of the entry before."""
        parts = (
            str(ENTRY_VERSION),
            self.budget,
            str(self.seq),
            self.kind,
            str(self.charge),
            self.body,
            self.sealed,
            self.previous,
        )
        # Names and JSON hold no line feed, or two entries could have one text.
        text = "\n".join(parts)
        return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Document) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, exact floats, no NaN."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )


def digest_of(value: Document) -> str:
    """Return the SHA-256 of a value's canonical text."""
    return sealed_digest(canonical(value))


def sealed_digest(text: str) -> str:
    """Return the SHA-256 of the text of an entry's sealed part, which holds a salt."""
    return hashlib.sha256(text.encode()).hexdigest()


def new_entry(
    budget: str,
    seq: int,
    *,
    kind: Kind,
    charge: int,
    body: Document,
    sealed: Document,
    previous: str,
) -> tuple[Entry, str]:
    """Build the next entry of a log.

    Args:
        budget: The budget's name.
        seq: The entry's number in the log, from 1.
        kind: What happened.
        charge: The number of the charge that it happened to; 0 for what concerns the budget.
        body: The public part.
        sealed: The sealed part; a salt is added, so that nobody finds it by trying.
        previous: The hash of the entry before.

    Returns:
        The entry, and the text of its sealed part.
    """
    salt = secrets.token_hex(16)
    sealed_text = canonical({**sealed, "salt": salt})
    draft = Entry(
        budget=budget,
        seq=seq,
        kind=str(kind),
        charge=charge,
        body=canonical(body),
        sealed=sealed_digest(sealed_text),
        previous=previous,
        hash="",
    )
    entry = replace(draft, hash=draft.computed_hash())
    return entry, sealed_text
