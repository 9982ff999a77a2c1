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


class Kind(StrEnum):
    """What an entry says happened."""

    CREATED = "created"
    RESERVED = "reserved"
    STARTED = "started"
    SETTLED = "settled"
    VOIDED = "voided"
    CLOSED = "closed"
    AUDITED = "audited"


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
        """Return the hash that this entry's content has."""
        place = str(ENTRY_VERSION), self.budget, str(self.seq), self.kind, str(self.charge)
        parts = (*place, self.body, self.sealed, self.previous)
        # Names and JSON hold no line feed, or two entries could have one text.
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def canonical(value: Mapping[str, Any]) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, floats exact, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value's canonical text."""
    return sealed_digest(canonical(value))


def sealed_digest(text: str) -> str:
    """Return the digest of a sealed part; its salt makes it say nothing about the rest."""
    return hashlib.sha256(text.encode()).hexdigest()


def new_entry(
    budget: str,
    seq: int,
    *,
    kind: Kind,
    charge: int,
    body: Mapping[str, Any],
    sealed: Mapping[str, Any],
    previous: str,
) -> tuple[Entry, str]:
    """Build the next entry of a log."""
    sealed_text = canonical({**sealed, "salt": secrets.token_hex(16)})
    digest = sealed_digest(sealed_text)
    draft = Entry(budget, seq, str(kind), charge, canonical(body), digest, previous, "")
    return replace(draft, hash=draft.computed_hash()), sealed_text
