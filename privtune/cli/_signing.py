"""``privtune budget sign``, and the signature's part of ``privtune budget verify``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import AsJson, console, emit_json, read_bytes, read_json

if TYPE_CHECKING:
    from privtune.ledger.signature import Signed


def sign(
    certificate: Annotated[Path, typer.Argument(help="The certificate, a file that was exported.")],
    *,
    key: Annotated[
        Path, typer.Option(help="Your Ed25519 private key in PEM, readable by you alone.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The signature's file; CERTIFICATE.sig if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a certificate and sign it. The certificate stays as it is, the key where it is.

    A key: openssl genpkey -algorithm ed25519 -out KEY.pem; what others check with: openssl pkey
    -in KEY.pem -pubout -out PUBLIC.pem.
    """
    from privtune.files import read_private
    from privtune.ledger import verify_certificate, write_file
    from privtune.ledger.signature import private_key, sign_certificate

    value = read_json(certificate)
    verified = verify_certificate(value)
    pem = read_private(key)
    passphrase = None
    if b"ENCRYPTED" in pem:
        passphrase = typer.prompt("Passphrase of the key", hide_input=True, err=True).encode()
    today = datetime.now(UTC).date().isoformat()
    signature = sign_certificate(value, private_key(pem, passphrase), signed_on=today)
    output = output or certificate.with_name(f"{certificate.name}.sig")
    write_file(output, json.dumps(signature, indent=1) + "\n")
    if as_json:
        emit_json({"file": str(output), **signature, "within_budget": verified.within_budget})
        return
    console().print(
        f"Signed the certificate of [bold]{verified.budget}[/] ({verified.entries} entries, "
        f"{verified.charges} charges) into {output}, dated {today}.",
        soft_wrap=True,
    )
    console().print(f"Your key, for those who check: {signature['key']}", soft_wrap=True)
    if not verified.within_budget:
        console().print(f"[bold]Mind:[/] {verified.warnings[0]}", soft_wrap=True, highlight=False)


def check(certificate: dict[str, Any], signature: Path, key: Path) -> Signed:
    """Check the signature file of a certificate against a public key's file."""
    from privtune.ledger.signature import check_signature, public_key

    return check_signature(certificate, read_json(signature), public_key(read_bytes(key)))
