"""Renders a certificate as one readable page, without scripts or anything from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from privtune.accounting import event_from_dict
from privtune.accounting.registry import formula
from privtune.files import forget_times
from privtune.ledger.audits import contradictions
from privtune.ledger.errors import LedgerFullError, LedgerReadOnlyError
from privtune.numbers import show_epsilon

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;max-width:62rem;margin:2.5rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p.lead{font-size:1.15rem;background:#eef4ff;border-left:4px solid #2f6fdd;padding:.8rem 1rem}
p.broken{font-size:1.15rem;background:#fdecea;border-left:4px solid #c62828;padding:.8rem 1rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #d9dee7}
th{font-weight:600;color:#4a5568;white-space:nowrap}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
.best{font-weight:700}.quiet{color:#5b6675}
details pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}
"""


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
    terms = certificate["budget"]["terms"]
    guarantee = certificate["guarantee"]
    name = _text(terms["name"])
    broken = (
        '<p class="broken">This budget is broken: what was charged to it costs more than the '
        f"ε = {_number(terms['epsilon'])} that it promises. It admits nothing more.</p>"
    )
    closed = "; it is closed for good" if certificate["budget"]["closed"] else ""
    verify = f"privtune budget verify --certificate {name}.certificate.json"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>Privacy certificate: {name}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Privacy certificate: {name}</h1>",
            f'<p class="quiet">Exported {_text(certificate["exported_at"])} by PrivTune '
            f"{_text(certificate['libraries'].get('privtune'))}.</p>",
            f'<p class="lead">Everything charged to this budget is together '
            f"<b>(ε = {_up(guarantee['epsilon'])}, δ = {_number(guarantee['delta'])})</b>"
            f"-differentially private per {_text(terms['unit'])}, under "
            f"{_text(terms['adjacency'])} adjacency. The budget is ε = "
            f"{_number(terms['epsilon'])}{closed}.</p>",
            *([] if certificate["within_budget"] else [broken]),
            "<h2>Budget</h2>",
            _facts(
                {
                    "Protected dataset": terms["dataset"] or "not described",
                    "Unit of privacy": terms["unit"],
                    "Adjacency": terms["adjacency"],
                    "Admission": f"{terms['admission']} (filter of Rényi order {terms['order']})",
                    "Created": certificate["budget"]["created_at"],
                }
            ),
            "<h2>Composition, by each bound</h2>",
            _bounds("of everything", guarantee),
            "<p>What was declared before anything was released is composed by any bound. What came "
            "later passed the filter.</p>",
            _facts({"Filter": _filter(certificate.get("filter"))}),
            f"<h2>Charges ({len(certificate['charges'])})</h2>",
            _charges(certificate["charges"]),
            *_declared(certificate["entries"]),
            *_audits(certificate.get("audits", ())),
            "<h2>How to check it</h2>",
            f"<p>The JSON file that belongs to this page checks itself: <code>{verify}</code>. "
            "Against the ledger: add the budget's name. Who notes the chain head elsewhere can "
            "tell when the log is cut off or rewritten.</p>",
            _facts(
                {
                    "Chain head": certificate["head"],
                    "Digest of the file": certificate["digest"],
                    "Entries": len(certificate["entries"]),
                    "Libraries": ", ".join(
                        f"{key} {value}" for key, value in certificate["libraries"].items()
                    ),
                }
            ),
            '<p class="quiet">Times at which charges started and ended are not part of a '
            "certificate: for a sealed selection they tell how many trials it took.</p>",
            "</body></html>",
            "",
        ]
    )


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever crashes leaves the old one, or none."""
    if not path.name:
        raise LedgerReadOnlyError(f"{path} is no file that can be written.")
    # Whoever crashes leaves the old file, or none, and never half of one.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Half of a surrogate pair, as a text of YAML may hold, is written as JSON escapes it.
        file = draft.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise LedgerReadOnlyError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        forget_times(draft)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise LedgerFullError(f"{path} could not be written: {error.strerror}.") from error


def _facts(facts: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{_text(k)}</th><td><code>{_text(v)}</code></td></tr>" for k, v in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


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


def _bounds(what: str, guarantee: Mapping[str, Any]) -> str:
    rows = []
    for name, value in guarantee["bounds"].items():
        best = ' class="best"' if name == guarantee["method"] else ""
        rows.append(f"<tr{best}><td>{_text(name)}</td><td>ε = {_up(value)}</td></tr>")
    return f"<table><tr><th>bound</th><th>{what}</th></tr>{''.join(rows)}</table>"


def _declared(entries: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what each arm rests on that is declared public, once for all that share it."""
    arms: dict[str, list[str]] = {}
    for body in (entry["body"] for entry in entries):
        if facts := body.get("public"):
            arms.setdefault(_facts(facts), []).append(f"{body['study']} / {body['arm']}")
    if arms:
        yield "<h2>Declared public: no guarantee covers it</h2>"
    for facts, names in arms.items():
        yield f"<p>{_text(', '.join(names))}</p>{facts}"


def _charges(charges: list[Mapping[str, Any]]) -> str:
    rows = [
        "<tr><th>charge</th><th>state</th><th>basis</th><th>for</th><th>what touched the data</th></tr>"
    ]
    for charge in charges:
        who = " / ".join(filter(None, (charge["study"], charge["arm"]))) or "outside of a study"
        note = f'<br><span class="quiet">{_text(charge["note"])}</span>' if charge["note"] else ""
        event = json.dumps(charge["event"], indent=1)
        rows.append(
            f"<tr><td>{_text(charge['id'])}</td><td>{_text(charge['state'])}</td>"
            f"<td>{_text(charge['basis'])}</td><td>{_text(who)}{note}</td>"
            f"<td>{_text(formula(event_from_dict(charge['event'])))}"
            f"<details><summary>event</summary><pre>{_text(event)}</pre></details></td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _audits(audits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not audits:
        return
    yield "<h2>Audits</h2>"
    yield (
        "<p>Bounds on ε from below, by experiment on made-up records. All is well where every row grows "
        "from left to right. Who repeats an audit with its seed finds the same numbers.</p>"
    )
    rows = [
        "<tr><th>of</th><th>audited ≤</th><th>lower ≤</th><th>reported ≤</th><th>published</th>"
        "<th>runs, confidence, seed</th></tr>"
    ]
    for audit in audits:
        whose = f"{audit['study']} / {audit['arm']}"
        for row in audit["rows"]:
            numbers = (row["audited"], row["lower"], row["reported"], audit["published"])
            cells = "".join(f"<td>{_number(number)}</td>" for number in numbers)
            how = f"{row['runs']:,}, {audit['confidence']:.0%}, {audit['seed']}"
            rows.append(
                f"<tr><td>{_text(whose)}: {_text(row['mechanism'])}</td>{cells}<td>{how}</td></tr>"
            )
    yield f"<table>{''.join(rows)}</table>"
    for sentence in contradictions(audits):
        yield f'<p class="broken">{_text(sentence)}</p>'


def _number(value: float | str) -> str:
    return "∞" if isinstance(value, str) else f"{value:.6g}"


def _up(value: float | str) -> str:
    """Return an ε rounded up: what is printed holds."""
    if isinstance(value, str):
        return "∞" if value == "inf" else value
    return show_epsilon(value, 4)


def _text(value: object) -> str:
    return escape(str(value))
