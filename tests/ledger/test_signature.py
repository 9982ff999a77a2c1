"""A signature tells a certificate from every other one, sound as that may be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from privtune.accounting import Gaussian
from privtune.errors import PrivTuneError
from privtune.files import read_private
from privtune.ledger import Budget, ChargeRequest, Ledger, export_certificate, verify_certificate
from privtune.ledger.signature import (
    SignatureError,
    check_signature,
    fingerprint,
    private_key,
    public_key,
    sign_certificate,
)
from tests.ledger.test_tampering import paths

pytestmark = pytest.mark.quick

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))


def certificate_of(folder: Path, note: str) -> dict[str, Any]:
    folder.mkdir()
    with Ledger(f"sqlite:///{folder}/p.db") as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b", dataset="Zürich"))
        ledger.reserve("b", [ChargeRequest(Gaussian(4.0), note=note)])
        return export_certificate(ledger.log.storage, "b")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return certificate_of(tmp_path_factory.mktemp("signed") / "one", "one")


@pytest.fixture(scope="module")
def signature(certificate: dict[str, Any]) -> dict[str, Any]:
    return sign_certificate(certificate, KEY, signed_on="2026-11-22")


def refused(certificate: Any, signature: Any, key: Any = None) -> str:
    with pytest.raises(SignatureError) as caught:
        check_signature(certificate, signature, key or KEY.public_key())
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_what_was_signed_passes(certificate: dict[str, Any], signature: dict[str, Any]) -> None:
    read_again = json.loads(json.dumps(certificate, indent=3))
    said = check_signature(read_again, json.loads(json.dumps(signature)), KEY.public_key())
    assert said.signed_on == "2026-11-22"
    assert said.key == fingerprint(KEY.public_key())
    assert set(signature) == {
        *("format", "version", "algorithm"),
        *("certificate", "key", "signed_on", "signature"),
    }


def test_any_changed_value_is_found(certificate: dict[str, Any], signature: dict[str, Any]) -> None:
    for path in paths(certificate):
        edited = copy.deepcopy(certificate)
        place: Any = edited
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = "other" if place[path[-1]] != "other" else "another"
        assert "not the one that was signed" in refused(edited, signature)


def test_a_rewritten_certificate_that_verifies_by_itself_is_found(
    certificate: dict[str, Any], signature: dict[str, Any], tmp_path: Path
) -> None:
    other = certificate_of(tmp_path / "two", "two")
    assert verify_certificate(other).budget == verify_certificate(certificate).budget
    assert "not the one that was signed" in refused(other, signature)
    assert "by another key" in refused(other, signature, OTHER.public_key())
    assert "canonical" in refused({"x": float("nan")}, signature)
    # Nor does it help to say in the signature what the other one's digest is.
    forged = sign_certificate(other, OTHER, signed_on="2026-11-22")
    assert "by another key" in refused(other, forged)
    forged["key"] = signature["key"]
    assert "does not fit" in refused(other, forged)
    assert "does not fit" in refused(other, {**forged, "signature": signature["signature"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"signed_on": "2026-11-21"}, "does not fit"),
        ({"signature": "AAAA"}, "does not fit"),
        ({"signature": "no base64"}, "does not fit"),
        ({"signature": "é"}, "does not fit"),
        ({"signature": 7}, "lacks a part"),
        ({"more": "x"}, "one too many"),
        ({"version": 2}, "version 1"),
        ({"algorithm": "none"}, "Ed25519"),
        ({"key": "0" * 64}, "another key"),
    ],
)
def test_a_changed_signature_is_found(
    certificate: dict[str, Any], signature: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    assert words in refused(certificate, {**signature, **change})


def pem(key: Any, passphrase: bytes | None = None) -> bytes:
    locked = forms.BestAvailableEncryption(passphrase) if passphrase else forms.NoEncryption()
    return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, locked))


def public_pem(key: Any) -> bytes:
    form = forms.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(forms.Encoding.PEM, form))


def test_keys_are_read_from_pem() -> None:
    assert fingerprint(private_key(pem(KEY)).public_key()) == fingerprint(KEY.public_key())
    assert fingerprint(public_key(public_pem(KEY))) == fingerprint(KEY.public_key())
    private_key(pem(KEY, b"secret"), b"secret")
    curve = ec.generate_private_key(ec.SECP256R1())
    for read, content in (
        (private_key, b"nothing"),
        (private_key, pem(KEY, b"secret")),
        (private_key, public_pem(KEY)),
        (private_key, pem(curve)),
        (public_key, b"nothing"),
        (public_key, pem(KEY)),
        (public_key, public_pem(curve)),
    ):
        with pytest.raises(SignatureError):
            read(content)


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o400, True), (0o640, False), (0o604, False)]
)
def test_a_private_key_that_others_may_read_is_refused(
    tmp_path: Path, mode: int, fine: bool
) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(pem(KEY))
    path.chmod(mode)
    if fine:
        assert read_private(path) == pem(KEY)
        return
    with pytest.raises(PrivTuneError, match="chmod 600"):
        read_private(path)
