"""``privtune budget``: budgets, their charges, certificates and signatures, and copies of it all."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import (
    DEFAULT_STORAGE,
    AsJson,
    Storage,
    emit_json,
    read_bytes,
    read_json,
    say,
    show_facts,
    show_table,
    tell,
)
from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    from privtune.ledger import Budget, Charge, Ledger, Verification


app = typer.Typer()


def _document_of(ledger: Ledger, budget: Budget) -> dict[str, Any]:
    """Return a budget's terms, state and reading of the filter, JSON-ready."""
    name = budget.name
    found = ledger.charges(name)
    return {
        **budget.to_dict(),
        "closed": ledger.is_closed(name),
        "charges": len(found),
        "states": Counter(str(one.state) for one in found),
        "spent": ledger.spent(name).to_dict(),
        "remaining": ledger.remaining(name),
        "filter": ledger.filter_state(name).to_dict(),
        "head": ledger.head(name),
    }


def _document_of_charge(charge: Charge) -> dict[str, Any]:
    values = {each.name: getattr(charge, each.name) for each in fields(charge)}
    times = {name: v.isoformat() for name, v in values.items() if isinstance(v, datetime)}
    return {**values, **times, "event": charge.event.to_dict(), "state": str(charge.state)}


def _filter_line(state: dict[str, Any]) -> str:
    if not state["in_force"]:
        return "not in force: nothing has started, so the block may still be declared"
    if state["capacity"] is None:
        return "no room: the declared block uses the budget up"
    return (
        f"Rényi order {state['order']:g}: {state['used']:.4g} of {state['capacity']:.4g} used "
        f"({state['used'] / state['capacity']:.0%})"
        + (", Gaussian charges from now on" if state.get("variance") else "")
    )


def _verify_log(ledger: Ledger, name: str, head: str | None) -> Verification:
    """Replay a budget's log; whoever named a certificate's file is told how that is checked."""
    from privtune.errors import PrivTuneError
    from privtune.ledger import UnknownBudgetError, verify

    try:
        return verify(ledger.log.storage, name, head=head)
    except UnknownBudgetError as error:
        if not Path(name).is_file():
            raise
        raise PrivTuneError(f"{error} A file is checked with --certificate {name}.") from None


@app.command()
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
    from privtune.ledger import verify_certificate
    from privtune.ledger.page import write_file
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
    tell(
        {"file": str(output), **signature, "within_budget": verified.within_budget},
        f"Signed the certificate of {verified.budget} ({verified.entries} entries, "
        f"{verified.charges} charges) into {output}, dated {today}.",
        f"Your key, for those who check: {signature['key']}",
        *(() if verified.within_budget else (f"Mind: {verified.warnings[0]}",)),
        as_json=as_json,
    )


Name = Annotated[str, typer.Argument(help="Name of the budget.")]
MaybeName = Annotated[str | None, typer.Argument(help="Name of the budget.")]


@app.command()
def create(
    name: Name,
    *,
    epsilon: Annotated[float, typer.Option(help="ε of everything ever released, above 0.")],
    delta: Annotated[float, typer.Option(help="δ of everything ever released, in (0, 1).")],
    adjacency: Annotated[str, typer.Option(help="add-remove or replace-one.")] = "add-remove",
    unit: Annotated[
        str, typer.Option(help="What is protected, in a word: record, person, hospital.")
    ] = "record",
    dataset: Annotated[str, typer.Option(help="The protected dataset, in words.")] = "",
    admission: Annotated[
        str, typer.Option(help="adaptive: later studies may follow; declared: none may.")
    ] = "adaptive",
    order: Annotated[
        float | None, typer.Option(help="Rényi order of the filter; chosen if not given.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Create a budget. It never changes afterwards; it can be closed for good."""
    from privtune.accounting import Adjacency
    from privtune.ledger import Admission, Budget
    from privtune.ledger.values import member
    from privtune.ledger.wording import PromiseWording

    with _ledger(storage) as ledger:
        budget = ledger.create_budget(
            Budget(
                epsilon,
                delta,
                name=name,
                adjacency=member(Adjacency, "adjacency", adjacency),
                unit=unit,
                dataset=dataset,
                admission=member(Admission, "admission", admission),
                order=order,
            )
        )
    neighbours = PromiseWording(budget.unit).state_adjacency(budget.adjacency)
    tell(
        budget.to_dict(),
        f"Budget {budget.name}: ε = {budget.epsilon:g}, δ = {budget.delta:g}, "
        f"{neighbours}, {budget.admission} admission (filter at order "
        f"{budget.order:g}).",
        as_json=as_json,
    )


@app.command("list")
def list_(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """List the budgets, with what is spent of each."""
    with _ledger(storage) as ledger:
        documents = [_document_of(ledger, budget) for budget in ledger.budgets()]
    if as_json:
        emit_json(documents)
        return
    rows = [
        (
            document["name"],
            f"{document['epsilon']:g}",
            f"{document['delta']:g}",
            show_epsilon(float(document["spent"]["epsilon"]), 4),
            show_left(document["remaining"], 4),
            str(document["charges"]),
            document["dataset"],
        )
        for document in documents
    ]
    show_table(("budget", "ε", "δ", "spent ε", "left ε", "charges", "dataset"), rows)


@app.command()
def show(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Show a budget: its terms, the odometer, and the filter beside it."""
    with _ledger(storage) as ledger:
        document = _document_of(ledger, ledger.budget(name))
    if as_json:
        emit_json(document)
        return
    spent = document["spent"]
    rows = {
        "budget": f"ε = {document['epsilon']:g} at δ = {document['delta']:g}",
        "adjacency": f"{document['adjacency']}, one {document['unit']}",
        "dataset": document["dataset"] or "not described",
        "admission": f"{document['admission']}{', closed' if document['closed'] else ''}",
        "charges": ", ".join(f"{n} {state}" for state, n in document["states"].items()) or "none",
        "odometer: spent": f"ε = {show_epsilon(float(spent['epsilon']), 4)} (by {spent['method']})",
        "odometer: left": f"ε = {show_left(document['remaining'], 4)}",
        "filter": _filter_line(document["filter"]),
        "chain head": document["head"],
    }
    show_facts(f"Budget {name}", rows.items())


@app.command()
def charges(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """List a budget's charges, oldest first. Times are for the curator only."""
    from privtune.accounting.registry import formula

    with _ledger(storage) as ledger:
        found = ledger.charges(name)
    if as_json:
        emit_json([_document_of_charge(charge) for charge in found])
        return
    rows = [
        (
            charge.id,
            str(charge.state),
            charge.basis,
            charge.study,
            charge.arm,
            formula(charge.event),
            charge.note,
            f"{charge.created_at:%Y-%m-%d %H:%M:%S}",
        )
        for charge in found
    ]
    columns = ("charge", "state", "basis", "study", "arm", "event", "note", "reserved (UTC)")
    show_table(columns, rows)


@app.command()
def charge(
    name: Name,
    event: Annotated[Path, typer.Argument(help="The event, a JSON file.")],
    *,
    note: Annotated[str, typer.Option(help="What is released, and by which tool.")],
    unit: Annotated[
        str, typer.Option(help="What the event counts as one: what its sensitivity is about.")
    ] = "record",
    released: Annotated[
        bool,
        typer.Option(
            "--already-released", help="It has happened: record it even if the budget breaks."
        ),
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Charge a release that is made with another tool: before it is made, if it fits.

    The charge counts as started at once. With --already-released it is recorded in any case.
    """
    from privtune.accounting import event_from_dict
    from privtune.ledger import ChargeRequest

    request = ChargeRequest(event_from_dict(read_json(event)), note=note, unit=unit)
    with _ledger(storage) as ledger:
        if released:
            made = ledger.record(name, request)
        else:
            [made] = ledger.reserve(name, [request])
            made = ledger.start(made.id)
        document = {**_document_of_charge(made), "remaining": ledger.remaining(name)}
        broken = ledger.spent(name).epsilon > ledger.budget(name).epsilon
    if as_json:
        emit_json(document)
        return
    say(f"Charged {made.id} ({made.state}); ε = {show_left(document['remaining'], 4)} is left.")
    if broken:
        say("The budget is exceeded: it admits nothing more.", loud=True)


@app.command()
def void(
    charge_id: Annotated[str, typer.Argument(help="The charge, like digits-3.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Give back a charge that never started."""
    with _ledger(storage) as ledger:
        made = ledger.void(charge_id)
    said = f"Voided {made.id}: no data was touched for it."
    tell(_document_of_charge(made), said, as_json=as_json)


@app.command()
def verify(  # noqa: PLR0917 (the command line passes them by name)
    name: MaybeName = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Check this exported certificate, from the file alone.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="A chain head noted earlier, which the log must contain.")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(help="The certificate's signature, checked with --key.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="The signer's public key in PEM, which you trust.")
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Replay a log, or check a certificate: chain, states, admissions, composition.

    With both, the log must also contain what the certificate says was there. Exits with 1 where a
    log or a certificate is not sound, and where it is but says that the budget is broken.
    """
    from privtune.ledger import verify_certificate
    from privtune.ledger.signature import check_signature, public_key

    if name is None and certificate is None:
        raise typer.BadParameter("name a budget, or a certificate with --certificate")
    if (signature is None) != (key is None) or (key is not None and certificate is None):
        raise typer.BadParameter("--signature and --key go together, with --certificate")
    verified = signed = None
    if certificate is not None:
        value = read_json(certificate)
        if signature is not None and key is not None:
            pem = read_bytes(key)
            signed = check_signature(value, read_json(signature), public_key(pem))
        verified = verify_certificate(value, head=head)
        head = verified.head
    if name is not None:
        with _ledger(storage) as ledger:
            verified = _verify_log(ledger, name, head)
    if verified is None:
        return
    if as_json:
        also = {} if signed is None else {"signature": signed.to_dict()}
        emit_json({"valid": True, **verified.to_dict(), **also})
    else:
        what = "log" if name is not None else "certificate"
        sound = "is sound" if verified.within_budget else "is unbroken, its budget is not"
        say(
            f"The {what} of {verified.budget} {sound}: {verified.entries} entries, "
            f"{verified.charges} charges, ε = {show_epsilon(float(verified.guarantee.epsilon), 4)} at δ = "
            f"{verified.guarantee.delta:g} (by {verified.guarantee.method})."
        )
        say(f"Chain head: {verified.head}")
        if signed is not None:
            say(f"Signed on {signed.signed_on} (by the signer's clock) with {signed.key}.")
        for warning in verified.warnings[0 if verified.within_budget else 1 :]:
            say(f"Mind: {warning}")
    if not verified.within_budget:
        sys.stderr.write(f"{verified.warnings[0]}\n")
        raise typer.Exit(1)


@app.command()
def export(  # noqa: PLR0917 (the command line passes them by name)
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option(help="The certificate's file; NAME.certificate.json if not given."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a readable page here as well.")] = None,
    witnesses: Annotated[
        bool,
        typer.Option(help="Ask autodp and dp-accounting, too; fail if more than our ε is proved."),
    ] = True,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Write a certificate of a budget: self-contained, checkable from the file alone."""
    from privtune.ledger import export_certificate, render_certificate
    from privtune.ledger.page import write_file

    with _ledger(storage) as ledger:
        certificate = export_certificate(ledger.log.storage, name, witnessed=witnesses)
    if as_json and output is None and html is None:
        emit_json(certificate)
        return
    output = output or Path(f"{name}.certificate.json")
    text = json.dumps(certificate, indent=1, allow_nan=False, ensure_ascii=False)
    write_file(output, text + "\n")
    if html is not None:
        write_file(html, render_certificate(certificate))
    written = {"certificate": str(output), "html": None if html is None else str(html)}
    tell(
        {**written, "head": certificate["head"]},
        f"Wrote {output}{f' and {html}' if html else ''}.",
        f"Chain head, to be noted elsewhere: {certificate['head']}",
        as_json=as_json,
    )


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The new file; it must not exist.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Copy the whole database, its write-ahead log included, while others work on it.

    The copy holds what the database holds: sealed trials and secrets. Keep it as you keep that.
    """
    from privtune.ledger import backup as copy

    with _ledger(storage) as ledger:
        names = ledger.log.names()
        path = copy(ledger.log.storage, file)
    tell(
        {"file": str(path), "budgets": names},
        f"Copied {len(names)} budgets to {path}. It holds what is sealed: keep it to yourself. Check "
        f"it with: privtune budget verify NAME --storage sqlite:///{path}",
        as_json=as_json,
    )


@app.command()
def close(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Close a budget for good: it admits nothing more."""
    with _ledger(storage) as ledger:
        ledger.close_budget(name)
    said = f"Budget {name} is closed for good."
    tell({"name": name, "closed": True}, said, as_json=as_json)


def _ledger(storage: str) -> Ledger:
    from privtune.ledger import Ledger

    return Ledger(storage)
