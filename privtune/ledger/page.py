"""Renders a certificate as one readable page, without scripts or anything from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privtune.accounting import event_from_dict
from privtune.accounting.registry import formula
from privtune.files import forget_times
from privtune.ledger.audits import contradictions
from privtune.ledger.errors import LedgerFullError, LedgerReadOnlyError
from privtune.ledger.wording import PromiseWording
from privtune.numbers import show_epsilon


def render_certificate(certificate: Mapping[str, Any]) -> str:
    """Return the page of a certificate. The JSON file is what can be verified, not the page.

    Args:
        certificate: The parsed file.

    Example:
        >>> from privtune.ledger import Budget, Ledger, export_certificate
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     page = render_certificate(export_certificate(ledger.log.storage, "clinic"))
        >>> "ε = 3" in page, "<script" in page
        (True, False)
    """
    import jinja2

    here = jinja2.FileSystemLoader(Path(__file__).parent)
    # Names, notes and public facts are whatever somebody wrote: all of it is escaped.
    environment = jinja2.Environment(loader=here, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"up": _up, "number": _number, "indented": _indented}
    environment.filters["formula"] = lambda event: formula(event_from_dict(event))
    page = environment.get_template("certificate.html").render(
        certificate=certificate,
        terms=certificate["budget"]["terms"],
        caveat=PromiseWording(certificate["budget"]["terms"]["unit"]).caveat,
        guarantee=certificate["guarantee"],
        filter=_filter(certificate.get("filter")),
        declared=_declared(certificate["entries"]),
        audits=certificate.get("audits", ()),
        contradictions=contradictions(certificate.get("audits", ())),
    )
    return f"{page}\n"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: whoever crashes leaves the old one, or none."""
    if not path.name:
        raise LedgerReadOnlyError(f"{path} is no file that can be written.")
    # Whoever crashes leaves the old file, or none, and never half of one.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if isinstance(content, str):
        # Half of a surrogate pair, as a text of YAML may hold, is written as JSON escapes it.
        content = content.encode(errors="backslashreplace")
    try:
        file = draft.open("wb")
    except OSError as error:
        raise LedgerReadOnlyError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        forget_times(draft)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LedgerFullError(f"{path} could not be written: {error.strerror}.") from error


def _filter(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "nothing was admitted by it"
    if not state["in_force"]:
        return "not in force: nothing has started"
    capacity = "nothing" if state["capacity"] is None else f"{state['capacity']:.6g}"
    used = state["used"] if isinstance(state["used"], str) else f"{state['used']:.6g}"
    return f"Rényi order {state['order']:g}: {used} of {capacity} used" + (
        ", Gaussian charges since" if state.get("variance") else ""
    )


def _declared(entries: list[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what arms rest on that is declared public, once for all arms that share it."""
    arms: dict[str, list[str]] = {}
    for body in (entry["body"] for entry in entries):
        if facts := body.get("public"):
            arms.setdefault(json.dumps(facts), []).append(f"{body['study']} / {body['arm']}")
    return [(", ".join(names), json.loads(facts)) for facts, names in arms.items()]


def _indented(value: object) -> str:
    return json.dumps(value, indent=1)


def _number(value: float | str) -> str:
    return "∞" if isinstance(value, str) else f"{value:.6g}"


def _up(value: float | str) -> str:
    """Return an ε rounded up: what is printed holds."""
    if isinstance(value, str):
        return "∞" if value == "inf" else value
    return show_epsilon(value, 4)
