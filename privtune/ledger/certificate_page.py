"""Renders a certificate as one readable page, without scripts or anything from outside."""

from __future__ import annotations

import json
from pathlib import Path

from privtune.accounting import event_from_dict
from privtune.accounting.registry import formula
from privtune.ledger.audits import contradictions
from privtune.ledger.chain import Document
from privtune.ledger.wording import PromiseWording
from privtune.numbers import show_epsilon


def render_certificate(certificate: Document) -> str:
    """Return a self-contained HTML page that shows a certificate to people.

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
    environment = jinja2.Environment(
        loader=here,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "up": _up,
        "number": _number,
        "indented": _indented,
        "formula": _formula,
    }
    template = environment.get_template("certificate.html")
    terms = certificate["budget"]["terms"]
    audits = certificate.get("audits", ())
    page = template.render(
        certificate=certificate,
        terms=terms,
        caveat=PromiseWording(terms["unit"]).caveat,
        guarantee=certificate["guarantee"],
        filter=_filter(certificate.get("filter")),
        binding=_binding(certificate),
        declared=_declared(certificate["entries"]),
        audits=audits,
        contradictions=contradictions(audits),
    )
    return f"{page}\n"


def _binding(certificate: Document) -> str:
    """Return in words which number says what was spent, and which rule decides what may still be charged.

    The odometer and the filter may differ, since they answer two questions.

    Args:
        certificate: The parsed file.
    """
    method = certificate["guarantee"]["method"]
    certified = (
        f"The smallest of these bounds is the certified ε ({method}): it says what was spent"
    )
    states = {charge["state"] for charge in certificate["charges"]}
    if states.isdisjoint({"started", "settled"}):
        return (
            f"{certified}. It also decides what may be charged until a run has started: all charges together "
            "must stay within the limit."
        )
    if certificate["budget"]["terms"]["admission"] == "declared":
        return f"{certified}. Nothing more can be charged, since a run has started."
    return (
        f"{certified}, and refuses nothing. The privacy filter alone decides what may still be charged "
        "(fully adaptive composition), since a run has started. What was charged before the first run had "
        "to stay within the limit by the best of the bounds."
    )


def _formula(event: Document) -> str:
    """Return the formula of an event that a certificate describes."""
    return formula(event_from_dict(event))


def _filter(state: Document | None) -> str:
    """Return in words how much of the privacy filter is used."""
    if state is None:
        return "no charge went through it"
    if not state["in_force"]:
        return "not used yet: no run has started"
    used = state["used"]
    if not isinstance(used, str):
        used = f"{used:.6g}"
    capacity = "nothing"
    if state["capacity"] is not None:
        capacity = f"{state['capacity']:.6g}"
    sentence = f"{used} of {capacity} used, at Rényi order {state['order']:g}"
    if state.get("variance"):
        sentence = f"{sentence}, only Gaussian charges since"
    return sentence


def _declared(entries: list[Document]) -> list[tuple[str, Document]]:
    """Return the facts that are declared public, each set with the names of the arms that share it."""
    arms: dict[str, list[str]] = {}
    for entry in entries:
        body = entry["body"]
        facts = body.get("public")
        if facts:
            key = json.dumps(facts)
            arm = f"{body['study']} / {body['arm']}"
            arms.setdefault(key, []).append(arm)
    facts_of_arms = []
    for key, names in arms.items():
        facts = json.loads(key)
        facts_of_arms.append((", ".join(names), facts))
    return facts_of_arms


def _indented(value: object) -> str:
    """Return a value as JSON on several lines."""
    return json.dumps(value, indent=1)


def _number(value: float | str) -> str:
    """Return a number as text in six digits, or ∞ for the text that stands for infinity in JSON."""
    return "∞" if isinstance(value, str) else f"{value:.6g}"


def _up(value: float | str) -> str:
    """Return an ε as text in four digits, rounded up."""
    if isinstance(value, str):
        return "∞" if value == "inf" else value
    return show_epsilon(value, 4)
