"""Signatures of certificates: Ed25519, detached, by a key that stays with whoever signs.

A certificate proves that it is consistent, not whose it is: who rewrites all of it, hashes included,
has another one that verifies by itself. A signature ties it to a key. No file, clock or storage is
touched here.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from privtune.ledger.chain import canonical, sealed_digest
from privtune.ledger.errors import LedgerError

FORMAT = "privtune-signature"
_FIXED = {"format": FORMAT, "version": 1, "algorithm": "ed25519"}
_FIELDS = ("certificate", "key", "signed_on")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class SignatureError(LedgerError):
    """A signature differs from its certificate or its key, or a key cannot be used."""


@dataclass(frozen=True)
class Signed:
    """The statement of a valid signature: its certificate, its key and its day.

    Attributes:
        certificate: The SHA-256 of the certificate's canonical text.
        key: The fingerprint of the public key.
        signed_on: The day, as YYYY-MM-DD, by the signer's word.
    """

    certificate: str
    key: str
    signed_on: str

    def to_dict(self) -> dict[str, str]:
        """Return the signature's facts as JSON-ready data."""
        return asdict(self)


def private_key(pem: bytes, passphrase: bytes | None = None) -> Ed25519PrivateKey:
    """Read a private key, as ``openssl genpkey -algorithm ed25519`` writes it."""
    try:
        key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SignatureError(
            "this is no private key in PEM, or its passphrase is another one; openssl genpkey "
            "-algorithm ed25519 makes a key."
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError("the private key is not Ed25519, the only kind that signs here.")
    return key


def public_key(pem: bytes) -> Ed25519PublicKey:
    """Read a public key, as ``openssl pkey -pubout`` writes it."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureError(
            "this is no public key in PEM; openssl pkey -in KEY.pem -pubout makes it of a private one."
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError("the public key is not Ed25519, the only kind that signs here.")
    return key


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key in DER, by which people compare keys."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def sign_certificate(
    certificate: Mapping[str, object], key: Ed25519PrivateKey, *, signed_on: str
) -> dict[str, Any]:
    """Return the detached signature of a certificate, ready for JSON.

    Args:
        certificate: The parsed file.
        key: Whose signature it is.
        signed_on: The day, as YYYY-MM-DD: no clock is asked here.

    Raises:
        SignatureError: The day is none, or the certificate holds what JSON cannot.
    """
    if not _DAY.fullmatch(signed_on):
        raise SignatureError("the day of a signature is written YYYY-MM-DD.")
    text = _canonical(certificate)
    statement = Signed(sealed_digest(text), fingerprint(key.public_key()), signed_on)
    signature = key.sign(_message(statement, text))
    encoded = base64.b64encode(signature).decode()
    return {**_FIXED, **statement.to_dict(), "signature": encoded}


def check_signature(
    certificate: Mapping[str, object], signature: Mapping[str, object], key: Ed25519PublicKey
) -> Signed:
    """Check a detached signature against a certificate and a key that is trusted.

    Args:
        certificate: The parsed file.
        signature: The parsed signature.
        key: The signer's, from elsewhere than the certificate.

    Returns:
        What the signature says.

    Raises:
        SignatureError: It is none, by another key, or of another certificate.
    """
    for name, value in _FIXED.items():
        if signature.get(name) != value:
            raise SignatureError(f"this is no {FORMAT} of version 1 by Ed25519.")
    names = (*_FIELDS, "signature")
    values = [signature.get(name) for name in names]
    has_all = signature.keys() == {*_FIXED, *names}
    are_texts = all(isinstance(value, str) for value in values)
    if not has_all or not are_texts:
        raise SignatureError("the signature lacks a part, or has one too many.")
    *fields, encoded = map(str, values)
    statement = Signed(*fields)
    if statement.key != fingerprint(key):
        raise SignatureError(f"the signature is by another key than this one ({fingerprint(key)}).")
    text = _canonical(certificate)
    if statement.certificate != sealed_digest(text):
        raise SignatureError(
            "the certificate is not the one that was signed: it was changed, rewritten or exchanged."
        )
    try:
        message = _message(statement, text)
        key.verify(base64.b64decode(encoded, validate=True), message)
    except (InvalidSignature, ValueError):  # no base64, or no ASCII
        raise SignatureError(
            "the signature does not fit: it, its day or the certificate was changed."
        ) from None
    return statement


def _message(statement: Signed, text: str) -> bytes:
    """Return the bytes that are signed: the statement as JSON, then the certificate's text."""
    # Canonical JSON holds no line feed, so the two parts cannot run into each other.
    header = canonical({**_FIXED, **statement.to_dict()})
    return f"{header}\n{text}".encode()


def _canonical(certificate: Mapping[str, object]) -> str:
    try:
        return canonical(certificate)
    except (ValueError, RecursionError):
        raise SignatureError("the certificate holds what canonical JSON cannot.") from None
