"""``privtune budget``: budgets, charges, certificates, signatures, and copies of the database.

Each command reads or writes the ledger through :mod:`privtune.ledger` and computes nothing itself, so
that Python, the pages and the command line name the same numbers. What is spent is shown rounded up, and
what is left rounded down.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import (
    AsJson,
    Storage,
    Wide,
    emit,
    emit_json,
    handing_on,
    read_bytes,
    read_json,
    say,
    say_left_out,
    show_facts,
    show_table,
)
from privtune.names import DEFAULT_STORAGE
from privtune.numbers import finite, show_epsilon, show_left
from privtune.prose import complain

if TYPE_CHECKING:
    from privtune.accounting import Event
    from privtune.ledger import Budget, Charge, Ledger, Verification
    from privtune.ledger.signature import Signed

app = typer.Typer()

_ADMISSION = {
    "adaptive": "charges are allowed at any time, also after a run has started",
    "declared": "charges are allowed only before the first run starts",
}
"""When a budget allows charges, in words."""
_STARTED = (
    "A charge by hand stays started until privtune budget settle says that its release is over: it is "
    "spent, released or not."
)
_FITS = "What fits is rounded down, and each line is one more arm by itself."
_MANY = 200  # different events from which on each is costed by RDP alone, which is quick


def _budget_document(ledger: Ledger, budget: Budget) -> dict[str, Any]:
    """Return a budget's terms, charges, ε spent and left, filter and last entry's hash as JSON-ready data.

    Args:
        ledger: The ledger, which each of them is read from.
        budget: One of its budgets.

    Returns:
        The terms as the budget's own document has them, and beside them the ``charges`` by number and by
        state, what is ``spent`` and ``remaining``, and the chain's ``head``.
    """
    name = budget.name
    charges_of_budget = ledger.charges(name)
    return {
        **budget.to_dict(),
        "dataset": ledger.dataset(name),
        "datasets": [str(dataset) for dataset in ledger.datasets(name)],
        "closed": ledger.is_closed(name),
        "charges": len(charges_of_budget),
        "states": Counter(str(charge.state) for charge in charges_of_budget),
        "spent": ledger.spent(name).to_dict(),
        "remaining": ledger.remaining(name),
        "filter": ledger.filter_state(name).to_dict(),
        "head": ledger.head(name),
    }


def _charge_document(charge: Charge) -> dict[str, Any]:
    """Return every field of a charge as JSON-ready data.

    Times are in ISO 8601; those are for the curator alone, as they tell how long a sealed round took.
    """
    document: dict[str, Any] = {}
    for field in fields(charge):
        value = getattr(charge, field.name)
        document[field.name] = value.isoformat() if isinstance(value, datetime) else value
    document["event"] = charge.event.to_dict()
    document["state"] = str(charge.state)
    document["dataset"] = None if charge.dataset is None else charge.dataset.to_dict()
    return document


def _count(number: int, singular: str, plural: str) -> str:
    """Return a number with its noun, as ``1 entry`` and ``2 entries``."""
    return f"1 {singular}" if number == 1 else f"{number} {plural}"


def _log_size(verification: Verification) -> str:
    """Return the numbers of entries and charges of a log as text, such as ``2 entries, 1 charge``.

    A number that is smaller than last time is what a reader notices of a log whose tail was cut.
    """
    entries = _count(verification.entries, "entry", "entries")
    charge_count = _count(verification.charges, "charge", "charges")
    return f"{entries}, {charge_count}"


def _list_states(counts: Mapping[str, int]) -> str:
    """Return how many charges are in each state, as ``2 settled, 1 voided``."""
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _filter_line(state: dict[str, Any]) -> str:
    """Return what the privacy filter of a budget allows now, in words.

    Args:
        state: The filter's state as JSON-ready data. ``used`` and ``capacity`` are Rényi divergences at
            its ``order``; ``capacity`` is None where nothing is left for the filter to give.
    """
    if not state["in_force"]:
        return "not used yet: it restricts charges that are made after the first run has started"
    if state["capacity"] is None:
        return "full: the charges before the first run used up the budget"
    used = state["used"]
    capacity = state["capacity"]
    restriction = "; Gaussian charges only from now on" if state.get("variance") else ""
    return (
        "each further charge must fit into it (fully adaptive composition), since a run has started. "
        f"Used by charges after the first run: {used / capacity:.0%} of its room ({used:.4g} of "
        f"{capacity:.4g} at Rényi order {state['order']:g}; this is no ε){restriction}"
    )


def _next_document(ledger: Ledger, name: str, remaining: float) -> dict[str, Any]:
    """Return the arms that fit on a budget next, and a note on why their ε is not the ε left.

    The ε that is left and the ε of an arm that still fits may differ either way: charges together cost
    less than their sum, and the privacy filter asks more of what comes after the first start. Without the
    note, a reader takes one of the two for an error.

    Args:
        ledger: The ledger.
        name: The budget's name.
        remaining: The budget's ε less what is spent.
    """
    from privtune.ledger.fitting import say_difference

    arms = ledger.next_arms(name)
    note = ledger.closed_to_all(name) or say_difference(arms, remaining)
    return {"fits": [arm.to_dict() for arm in arms], "fits_note": note}


def _describe_method(method: str) -> str:
    """Return a text on which charges the spent ε covers, and by which bound."""
    return "nothing was charged" if method == "nothing" else f"all charges together, by {method}"


def _in_a_cell(text: str) -> str:
    """Return a text cut at a word to 32 signs, which a table of 80 columns can hold."""
    return shorten(text, 32, placeholder=" ...")


def _budget_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of a budget's table: a label, an ε, and what the ε stands for.

    Args:
        document: The budget, its ``spendings``, and if they were looked for what ``fits``.
    """
    spent = document["spent"]
    terms = f"δ = {document['delta']:g}, {document['adjacency']}, one {document['unit']}"
    spent_epsilon = float(spent["epsilon"])
    rows = [
        ("budget", show_left(document["epsilon"], 4), terms),
        ("spent", show_epsilon(spent_epsilon, 4), _describe_method(spent["method"])),
        ("left", show_left(document["remaining"], 4), "the budget's ε less what is spent"),
    ]
    excess = spent_epsilon - document["epsilon"]
    if excess > 0:
        words = "spent beyond the budget: every further charge is refused"
        rows.append(("EXCEEDED", show_epsilon(excess, 4), words))
    for arm in document.get("fits", ()):
        epsilon = f"{arm['epsilon']:g}" if arm["epsilon"] else "none"
        rows.append((f"fits: {arm['kind']}", epsilon, arm["shape"]))
    for part in document["spendings"]:
        count = _count(part["charges"], "charge", "charges")
        kind = "study" if part["study"] else "note"
        name = _in_a_cell(part["study"] or part["note"] or "without a note")
        rows.append((kind, show_epsilon(float(part["epsilon"]), 4), f"{count}: {name}"))
    return rows


def _verify_log(ledger: Ledger, name: str, head: str | None) -> Verification:
    """Verify a budget's log, and point to ``--certificate`` if the name is that of a file.

    Args:
        ledger: The ledger.
        name: The budget's name.
        head: A hash that the log must contain, if one was noted earlier.

    Raises:
        UnknownBudgetError: No budget has this name.
        PrivTuneError: No budget has it, but a file has.
    """
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
    certificate: Annotated[
        Path, typer.Argument(help="Certificate file, from privtune budget export.")
    ],
    *,
    key: Annotated[
        Path, typer.Option(help="Your Ed25519 private key in PEM, readable by you alone.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="File for the signature. By default CERTIFICATE.sig.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a certificate and sign it. The signature is a file of its own; the certificate is not changed.

    To make a key: openssl genpkey -algorithm ed25519 -out KEY.pem. To make its public key, with which
    others check the signature: openssl pkey -in KEY.pem -pubout -out PUBLIC.pem.
    """
    from privtune.files import read_private, write_whole
    from privtune.ledger import verify_certificate
    from privtune.ledger.signature import private_key, sign_certificate

    content = read_json(certificate)
    verification = verify_certificate(content)
    pem = read_private(key)
    passphrase = None
    if b"ENCRYPTED" in pem:
        passphrase = typer.prompt("Passphrase of the key", hide_input=True, err=True).encode()
    today = datetime.now(UTC).date().isoformat()
    signature = sign_certificate(content, private_key(pem, passphrase), signed_on=today)
    output = output or certificate.with_name(f"{certificate.name}.sig")
    write_whole(output, json.dumps(signature, indent=1) + "\n")
    document = {"file": str(output), **signature, "within_budget": verification.within_budget}
    size = _log_size(verification)
    lines = [
        f"Signed the certificate of {verification.budget} ({size}) into {output}, dated {today}.",
        f"Your public key, for those who check the signature: {signature['key']}",
        handing_on(output),
    ]
    if not verification.within_budget:
        lines.append(f"Warning: {verification.warnings[0]}")
    emit(document, *lines, as_json=as_json)


Name = Annotated[str, typer.Argument(help="Name of the budget.")]
MaybeName = Annotated[str | None, typer.Argument(help="Name of the budget.")]


@app.command()
def create(
    name: Name,
    *,
    epsilon: Annotated[float, typer.Option(help="Limit of ε for all releases together, above 0.")],
    delta: Annotated[float, typer.Option(help="Limit of δ for all releases together, in (0, 1).")],
    adjacency: Annotated[
        str, typer.Option(help="Neighbouring datasets: add-remove or replace-one.")
    ] = "add-remove",
    unit: Annotated[
        str, typer.Option(help="Privacy unit, in a word: record, person, hospital.")
    ] = "record",
    dataset: Annotated[
        str,
        typer.Option(help="Name of the protected dataset. By default that of the first study."),
    ] = "",
    admission: Annotated[
        str,
        typer.Option(
            help="When charges are allowed. adaptive: at any time, also after a run has started. "
            "declared: only before the first run starts (fixed in advance)."
        ),
    ] = "adaptive",
    order: Annotated[
        float | None,
        typer.Option(
            help="Rényi order of the privacy filter (fully adaptive composition). By default the best one."
        ),
    ] = None,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Create a budget: a limit of ε and δ for one dataset. It cannot be changed later, only closed."""
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
    emit(
        budget.to_dict(),
        f"Budget {budget.name}: ε = {budget.epsilon:g}, δ = {budget.delta:g}, "
        f"{neighbours}. Admission {budget.admission}: {_ADMISSION[budget.admission]}.",
        as_json=as_json,
    )


@app.command("list")
def list_(storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """List the budgets, with what is spent and left of each."""
    from privtune.ledger.places import is_missing

    documents: list[dict[str, Any]] = []
    if not is_missing(storage):
        with _ledger(storage) as ledger:
            for budget in ledger.budgets():
                document = _budget_document(ledger, budget)
                documents.append(document)
    if as_json:
        emit_json(documents)
        return
    if not documents:
        say("There is no budget in this storage: privtune budget create makes one.")
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
def show(
    name: Name,
    fits: Annotated[
        bool,
        typer.Option(
            "--fits/--no-fits", help="Look for what fits next, too; that takes some seconds."
        ),
    ] = True,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Show a budget: what is spent, what is left, and what fits next."""
    with _ledger(storage) as ledger:
        document = _budget_document(ledger, ledger.budget(name))
        document["spendings"] = [finite(asdict(part)) for part in ledger.spendings(name)]
        if fits:
            document |= _next_document(ledger, name, document["remaining"])
    if as_json:
        emit_json(document)
        return
    rows = _budget_rows(document)
    say(f"Budget {name}", bold=True)
    columns = ("", "ε", "of what")
    show_table(columns, rows, numeric=["ε"], keep_lines=True, prose="of what")
    if document["spendings"]:
        say(
            "Spent is the ε of all charges together; that of a study or a note is of its own charges "
            "together, so these do not add up; privtune budget charges has the ε of each charge alone."
        )
    if document.get("fits"):
        say(_FITS)
    if note := document.get("fits_note"):
        say(f"{note[0].upper()}{note[1:]}.")
    closed = ", closed" if document["closed"] else ""
    facts = {
        "dataset": document["dataset"] or "not named yet",
        "read from": "; ".join(document["datasets"]) or "nothing so far",
        "charges": _list_states(document["states"]) or "none",
        "admission": f"{document['admission']}{closed}",
        "privacy filter": _filter_line(document["filter"]),
    }
    show_facts("", facts.items())
    # On a line of its own, which a terminal of 80 columns holds: verify --head takes it.
    say(f"Chain head: {document['head']}")


def _name_payer(charge: Charge) -> str:
    """Return the study and arm of a charge, or the beginning of its note where it has none."""
    names = [name for name in (charge.study, charge.arm) if name]
    if names:
        return " / ".join(names)
    return _in_a_cell(charge.note)


@app.command()
def charges(
    name: Name,
    wide: Wide = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """List a budget's charges and their ε, oldest first.

    The ε is that of each charge alone, and that of it and all before it together. Times are for the
    curator only.
    """
    from privtune.accounting.registry import formula
    from privtune.views.text import together as how_together

    with _ledger(storage) as ledger:
        budget = ledger.budget(name)
        charges_of_budget = ledger.charges(name)
        spent = ledger.spent(name)
        together = ledger.spent_by_charge(name)
    alone = _costs_alone(budget, [charge.event for charge in charges_of_budget])
    if as_json:
        documents = []
        for charge in charges_of_budget:
            costs = {"epsilon": alone[charge.event], "together": together[charge.id]}
            documents.append(_charge_document(charge) | finite(costs))
        emit_json(documents)
        return
    rows = [
        (
            charge.id,
            str(charge.state),
            show_epsilon(alone[charge.event], 4),
            show_epsilon(together[charge.id], 4),
            _name_payer(charge),
            charge.note,
            charge.basis,
            formula(charge.event),
            f"{charge.created_at:%Y-%m-%d %H:%M:%S}",
        )
        for charge in charges_of_budget
    ]
    columns = (
        "charge", "state", "ε alone", "together", "for", "note", "basis", "event",
        "reserved (UTC)",
    )  # fmt: skip
    spare = () if wide else ("reserved (UTC)", "event", "basis", "note")
    numeric = ["ε alone", "together"]
    left_out = show_table(
        columns, rows, numeric=numeric, keep_lines=not wide, wide=wide, spare=spare
    )
    say_left_out(left_out)
    say(
        f"All charges together: ε = {show_epsilon(spent.epsilon)} of {budget.epsilon:g} at δ = "
        f"{budget.delta:g}, {how_together(spent)}."
    )
    if not charges_of_budget:
        return
    states_by_hand = [charge.state for charge in charges_of_budget if not charge.study]
    if "started" in states_by_hand:
        say(_STARTED)
    first = charges_of_budget[0]
    if together[first.id] > alone[first.event]:
        say(
            "The first is dearer together than alone: a part of δ is set aside for what may follow."
        )


def _costs_alone(budget: Budget, events: Sequence[Event]) -> dict[Event, float]:
    """Return the ε of each event by itself at a budget's δ, by RDP alone if there are very many.

    Args:
        budget: For its δ and adjacency.
        events: Events of charges. Equal ones, as of arms that were repeated, are computed once: the best
            bound of one event takes up to seconds.

    Returns:
        The ε of each different event.
    """
    from privtune.accounting import epsilon

    different = list(dict.fromkeys(events))
    method: Any = "best" if len(different) <= _MANY else "rdp"
    terms: dict[str, Any] = {"adjacency": budget.adjacency, "method": method}
    return {event: epsilon(event, budget.delta, **terms).epsilon for event in different}


@app.command()
def charge(
    name: Name,
    event: Annotated[
        Path, typer.Argument(help="JSON file with the event: mechanisms, sampling, steps.")
    ],
    *,
    note: Annotated[
        str, typer.Option(help="What is released, and with which tool: needed, as the log says it.")
    ] = "",
    unit: Annotated[
        str,
        typer.Option(help="Privacy unit of the event, as its sensitivity assumes: record, person."),
    ] = "record",
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Dataset that the release is computed from. It must be the budget's dataset."
        ),
    ] = None,
    is_released: Annotated[
        bool,
        typer.Option(
            "--already-released",
            help="The release has been made: record it even if that exceeds the budget.",
        ),
    ] = False,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Charge a release that another tool makes, if it fits.

    Do this before the release. The charge is spent at once and cannot be taken back. Use privtune budget
    settle once the release is over, and --already-released to record a release that has been made.
    """
    from privtune.accounting import epsilon, event_from_dict
    from privtune.errors import PrivTuneError
    from privtune.ledger import ChargeRequest, Dataset

    if not note.strip():
        raise PrivTuneError(
            "--note is missing: in one line what is released, and by which tool, for those who read the "
            "log and its certificates; nothing private. Such as --note 'table of counts, by OpenDP'. "
            "Nothing was charged."
        )
    protected = None if dataset is None else Dataset(dataset, declared=True)
    remedy = 'An event is a JSON file, as {"type": "gaussian", "noise_multiplier": 2.0} is.'
    event_document = read_json(event, remedy=remedy)
    request = ChargeRequest(
        event_from_dict(event_document), note=note, unit=unit, dataset=protected
    )
    with _ledger(storage) as ledger:
        if protected is not None and (warning := ledger.check_dataset(name, protected)):
            say(warning, err=True)
        if is_released:
            new_charge = ledger.record(name, request)
        else:
            [new_charge] = ledger.reserve(name, [request], start=True)
        budget = ledger.budget(name)
        alone = epsilon(new_charge.event, budget.delta, adjacency=budget.adjacency)
        spent = ledger.spent(name).epsilon
        costs = {"epsilon": alone.epsilon, "spent": spent, "remaining": ledger.remaining(name)}
        document = {**_charge_document(new_charge), **finite(costs)}
    if as_json:
        emit_json(document)
        return
    cost = show_epsilon(alone.epsilon, 4)
    remaining = show_left(document["remaining"], 4)
    say(
        f"Charged {new_charge.id} ({new_charge.state}): it costs ε = {cost} alone. All charges together "
        f"spend ε = {show_epsilon(spent, 4)} of {budget.epsilon:g}; ε = {remaining} is left."
    )
    if not is_released:
        say(_STARTED)
    if spent > budget.epsilon:
        say("The budget is exceeded: every further charge is refused.", loud=True)


@app.command()
def settle(
    charge_id: Annotated[str, typer.Argument(help="Name of the charge, such as digits-3.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Say that the release of a charge by hand is over.

    Nothing is given back: it was spent when it was charged. Once all earlier charges are over, the budget
    may charge by Gaussian composition, which holds more.
    """
    from privtune.errors import PrivTuneError

    with _ledger(storage) as ledger:
        charge = ledger.charge(charge_id)
        if charge.study:
            raise PrivTuneError(
                f"Charge {charge_id} belongs to study {charge.study!r}, arm {charge.arm!r}, which settles it "
                f"at its release: privtune study run {charge.study}. Settle charges by hand alone."
            )
        charge = ledger.settle(charge_id)
    emit(_charge_document(charge), f"Settled {charge.id}: its release is over.", as_json=as_json)


@app.command()
def void(
    charge_id: Annotated[str, typer.Argument(help="Name of the charge, such as digits-3.")],
    storage: Storage = DEFAULT_STORAGE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a charge that has not started. Says first whether the budget gets its ε back, then asks."""
    with _ledger(storage) as ledger:
        effect = ledger.void_effect(charge_id)
        if not yes:
            say(effect.sentence, err=True)
            typer.confirm(f"Void {charge_id}?", abort=True, err=True)
        charge = ledger.void(charge_id)
    document = {**_charge_document(charge), "gives_back": effect.gives_back}
    line = f"Voided {charge.id}."
    if yes:
        # Whoever was asked has read it already.
        line = f"{line} {effect.sentence}".rstrip()
    emit(document, line, as_json=as_json)


@app.command()
def verify(  # noqa: PLR0917 (the command line passes them by name)
    name: MaybeName = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Check this certificate file. The database is not needed.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Hash of the log's last entry (chain head) that you noted earlier. The log must contain it."
        ),
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
    """Check the log of a budget, or a certificate.

    Both are checked for hash chain, states, admitted charges and ε. With both, the log must also
    contain every entry of the certificate. Exits with 1 if a log or a certificate is not sound, or if
    the budget is exceeded.
    """
    from privtune.ledger import verify_certificate
    from privtune.ledger.signature import check_signature, public_key

    if name is None and certificate is None:
        raise typer.BadParameter("name a budget, or a certificate with --certificate")
    if (signature is None) != (key is None) or (key is not None and certificate is None):
        raise typer.BadParameter("--signature and --key go together, with --certificate")
    verification = None
    endorsement = None
    if certificate is not None:
        content = read_json(certificate)
        if signature is not None and key is not None:
            pem = read_bytes(key)
            endorsement = check_signature(content, read_json(signature), public_key(pem))
        verification = verify_certificate(content, head=head)
        # A log that goes on from the certificate contains its head.
        head = verification.head
    if name is not None:
        with _ledger(storage) as ledger:
            verification = _verify_log(ledger, name, head)
    if verification is None:
        return
    if as_json:
        document = {"valid": True, **verification.to_dict()}
        if endorsement is not None:
            document["signature"] = endorsement.to_dict()
        emit_json(document)
    else:
        subject = "log" if name is not None else "certificate"
        _print_verification(verification, endorsement, subject)
    if not verification.within_budget:
        complain(verification.warnings[0])
        raise typer.Exit(1)


def _print_verification(
    verification: Verification, endorsement: Signed | None, subject: str
) -> None:
    """Print the verdict on a log or certificate, with its size, ε, last entry's hash and warnings.

    Args:
        verification: What it says. That the budget is exceeded is the first of its warnings, and is left
            to the caller, who prints it on standard error.
        endorsement: The signature, where one was checked.
        subject: ``log`` or ``certificate``.
    """
    verdict = "is sound"
    warnings = verification.warnings
    if not verification.within_budget:
        verdict = "is unbroken, but the budget is exceeded"
        warnings = warnings[1:]
    guarantee = verification.guarantee
    epsilon = show_epsilon(float(guarantee.epsilon), 4)
    say(
        f"The {subject} of {verification.budget} {verdict}: {_log_size(verification)}, ε = "
        f"{epsilon} at δ = {guarantee.delta:g} (by {guarantee.method})."
    )
    say(f"Chain head: {verification.head}")
    if endorsement is not None:
        say(f"Signed on {endorsement.signed_on} (by the signer's clock) with {endorsement.key}.")
    for warning in warnings:
        say(f"Warning: {warning}")


@app.command()
def export(  # noqa: PLR0917 (the command line passes them by name)
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the certificate. By default NAME.certificate.json."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    witnesses: Annotated[
        bool,
        typer.Option(
            help="Also compute ε with autodp and dp-accounting; fail if they prove a larger one."
        ),
    ] = True,
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Write a certificate of a budget, checkable from the file alone."""
    from privtune.files import json_lines, write_whole
    from privtune.ledger import export_certificate, render_certificate

    with _ledger(storage) as ledger:
        certificate = export_certificate(ledger.log.storage, name, witnessed=witnesses)
    if as_json and output is None and html is None:
        emit_json(certificate)
        return
    output = output or Path(f"{name}.certificate.json")
    write_whole(output, json_lines(certificate))
    files = [output]
    if html is not None:
        write_whole(html, render_certificate(certificate))
        files.append(html)
    document = {
        "certificate": str(output),
        "html": None if html is None else str(html),
        "head": certificate["head"],
    }
    names = " and ".join(str(file) for file in files)
    emit(
        document,
        f"Wrote {names}.",
        f"Chain head (hash of the last entry; note it elsewhere): {certificate['head']}",
        handing_on(*files),
        as_json=as_json,
    )


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    storage: Storage = DEFAULT_STORAGE,
    as_json: AsJson = False,
) -> None:
    """Copy the whole database, while others work on it.

    The copy includes its write-ahead log. It is as secret as the database: it holds sealed trials and
    secrets. It is read-only. If the original is lost, privtune budget restore lets you continue with
    the copy.
    """
    from privtune.ledger import backup as copy
    from privtune.study.folders import folders_with_results
    from privtune.study.trials import lay_out_copy

    with _ledger(storage) as ledger:
        names = ledger.log.names()
        path = copy(ledger.log.storage, file)
        lay_out_copy(path)
        folders = [str(folder) for folder in folders_with_results(ledger.log.storage)]
    emit(
        {"file": str(path), "budgets": names, "folders": folders},
        f"Copied {len(names)} budgets to {path}. It holds secret trials: keep it to yourself. Check "
        f"it with: privtune budget verify NAME --storage sqlite:///{path}",
        "The copy is read-only. If the original is lost, continue with the copy: privtune budget restore "
        f"--storage sqlite:///{path}",
        *(f"Large models are not in the copy. Also copy {folder}." for folder in folders),
        as_json=as_json,
    )


@app.command()
def restore(
    storage: Storage = DEFAULT_STORAGE,
    leave_files: Annotated[
        bool,
        typer.Option("--leave-files", help="Restore even if files or objects are missing."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a copy of a database usable in place of the original.

    A backup, a copied file, and a database that was moved to another file system or machine are
    copies, which are read-only. Restore one only if the original is lost, or will never be charged
    again.
    """
    from privtune.study.restore import MEANING, restore_store

    if not yes:
        say(MEANING, err=True)
        typer.confirm("Restore it?", abort=True, err=True)
    restoration = restore_store(storage, leave_files=leave_files)
    document = {
        **asdict(restoration),
        "folders": [str(folder) for folder in restoration.folders],
        "meaning": MEANING,
    }
    store = restoration.store[:12]
    origin = restoration.origin[:12]
    lines = [
        f"Restored: this database is now store {store}, a copy of {origin} "
        f"({restoration.original}). The logs of {len(restoration.budgets)} budgets record that."
    ]
    if yes:
        # Whoever was asked has read it already.
        lines.append(MEANING)
    for folder in restoration.folders:
        lines.append(
            f"{folder} belongs to the original and was not deleted. Remove it if the original is lost."
        )
    emit(document, *lines, as_json=as_json)


@app.command()
def close(name: Name, storage: Storage = DEFAULT_STORAGE, as_json: AsJson = False) -> None:
    """Close a budget for good: every further charge is refused."""
    with _ledger(storage) as ledger:
        ledger.close_budget(name)
    line = f"Budget {name} is closed for good: every further charge is refused."
    emit({"name": name, "closed": True}, line, as_json=as_json)


def _ledger(storage: str) -> Ledger:
    """Open the ledger of a database, whose module is imported only here to keep help fast."""
    from privtune.ledger import Ledger

    return Ledger(storage)
