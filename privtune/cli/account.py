"""``privtune account``: what an event costs, and the noise that meets a target."""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.cli._common import (
    AsJson,
    console,
    emit_json,
    say,
    show_changes,
    show_cost,
    show_table,
)
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import read_bounded
from privtune.numbers import ceil_digits

if TYPE_CHECKING:
    from privtune.accounting import Adjacency, Event, Explanation, Guarantee

app = typer.Typer()


class Method(StrEnum):
    """Which bounds may answer."""

    BEST = "best"
    RDP = "rdp"
    PLD = "pld"
    AUTODP = "autodp"


class Neighbours(StrEnum):
    """The accountants' adjacencies, which need not be imported for help."""

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


EventFile = Annotated[
    str, typer.Argument(metavar="EVENT.json", help="A file with an event as JSON; - reads stdin.")
]
Delta = Annotated[float, typer.Option("--delta", help="Target delta, between 0 and 1.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Target epsilon.")]
AdjacencyOption = Annotated[
    Neighbours,
    typer.Option(
        "--adjacency",
        help="Neighbouring datasets. replace-one refuses events that no bound of it covers, and "
        "charges a parallel event as its two dearest parts together.",
    ),
]
MethodOption = Annotated[Method, typer.Option("--method", help="Which bounds may answer.")]


def _read(source: str) -> Event:
    from privtune.accounting import event_from_json

    if source == "-":
        return event_from_json(sys.stdin.read())
    path = Path(source)
    try:
        text = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InvalidInputError("EVENT.json", source, f"cannot be read: {reason}") from None
    return event_from_json(text)


def _least(value: float) -> str:
    """Print what something costs or saves at least, rounded down."""
    return f"{-ceil_digits(-value, 6):.6g}" if math.isfinite(value) else "∞"


def _show(answer: Guarantee, wanted: str, document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(document)
        return
    value = answer.epsilon if wanted == "epsilon" else answer.delta
    given = f"δ = {answer.delta:g}" if wanted == "epsilon" else f"ε = {answer.epsilon:g}"
    say(f"{'ε' if wanted == 'epsilon' else 'δ'} = {show_cost(value)} at {given} {_by(answer)}")
    rows = [
        (
            name,
            bound if isinstance(bound, str) else (_least if name == "lower" else show_cost)(bound),
        )
        for name, bound in document["bounds"].items()
    ]
    show_table(("bound", wanted), rows)


def _by(answer: Guarantee) -> str:
    return f"({answer.adjacency.value}), by {answer.method.replace('_', ' ')}"


@app.command("epsilon")
def epsilon_command(
    event_file: EventFile,
    delta: Delta,
    method: MethodOption = Method.BEST,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print the epsilon of an event at a delta, by every bound that applies."""
    from privtune.accounting import Adjacency, lower_bound
    from privtune.accounting import epsilon as account_epsilon

    event = _read(event_file)
    if method is Method.AUTODP:
        _show_autodp(event, delta, Adjacency(adjacency), as_json=as_json)
        return
    answer = account_epsilon(event, delta, adjacency=Adjacency(adjacency), method=method.value)
    document = answer.to_dict()
    if method is not Method.RDP:
        # What an explicit instance costs: no valid bound lies below it.
        lower = lower_bound(event, delta, adjacency=Adjacency(adjacency))
        document["bounds"]["lower"] = lower if math.isfinite(lower) else "inf"
    _show(answer, "epsilon", document, as_json=as_json)


def _show_autodp(event: Event, delta: float, adjacency: Adjacency, *, as_json: bool) -> None:
    """Show what autodp says; ours stands beside it, and decides."""
    from privtune.accounting import Guarantee
    from privtune.accounting.compare import AUTODP, ask_witnesses, autodp_epsilon

    theirs = autodp_epsilon(event, delta, adjacency=adjacency)
    said = ask_witnesses(event, delta, adjacency=adjacency)
    bounds = {"autodp": theirs, "rdp": said.composed, "best of ours": said.ours}
    answer = Guarantee(theirs, delta, "autodp", adjacency, bounds)
    document = {
        **answer.to_dict(),
        "why": next(a.why for a in said.witnesses if a.tool == AUTODP),
        "objection": said.objection,
    }
    document["bounds"]["lower"] = said.lower if math.isfinite(said.lower) else "inf"
    _show(answer, "epsilon", document, as_json=as_json)
    if said.objection:
        raise PrivTuneError(said.objection)


@app.command("delta")
def delta_command(
    event_file: EventFile,
    epsilon: Epsilon,
    method: MethodOption = Method.BEST,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print the delta of an event at an epsilon, by every bound that applies."""
    from privtune.accounting import Adjacency
    from privtune.accounting import delta as account_delta

    event = _read(event_file)
    answer = account_delta(event, epsilon, adjacency=Adjacency(adjacency), method=method.value)
    _show(answer, "delta", answer.to_dict(), as_json=as_json)


@app.command("calibrate")
def calibrate_command(
    event_file: EventFile,
    epsilon: Epsilon,
    delta: Delta,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Scale the noise multipliers of an event until it meets a target; print the event."""
    from privtune.accounting import Adjacency, calibrate

    found = calibrate(
        _read(event_file), epsilon=epsilon, delta=delta, adjacency=Adjacency(adjacency)
    )
    answer = found.guarantee
    if as_json:
        emit_json(
            {"event": found.event.to_dict(), "scale": found.scale, "guarantee": answer.to_dict()}
        )
        return
    scale = f"{ceil_digits(found.scale, 6):.6g}"
    say(f"noise × {scale}: ε = {show_cost(answer.epsilon)} at δ = {delta:g} {_by(answer)}")
    console().print_json(data=found.event.to_dict())


@app.command("explain")
def explain_command(
    event_file: EventFile,
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print a tree that shows where epsilon comes from, part by part."""
    from privtune.accounting import Adjacency, explain

    found = explain(_read(event_file), delta, adjacency=Adjacency(adjacency))
    if as_json:
        emit_json({"delta": delta, "adjacency": adjacency.value, "tree": found.to_dict()})
        return
    _print_tree(found)
    say(
        f"ε of each part alone, at δ = {delta:g}. Parts do not add up: composition is cheaper than the "
        "sum. “Saves” is what leaving the part out would save, “at least” what some mechanism with this "
        "event costs."
    )


def _print_tree(node: Explanation, depth: int = 0) -> None:
    saved = f", saves {_least(node.saved)}" if node.saved is not None else ""
    lower = f", at least {_least(node.lower)}" if node.lower is not None else ""
    more = f"({node.method}{saved}{lower})"
    say(f"{'    ' * depth}ε = {show_cost(node.epsilon)}  {node.text} {more}")
    for child in node.children:
        _print_tree(child, depth + 1)


@app.command("compare")
def compare_command(event_file: EventFile, delta: Delta = 1e-5, as_json: AsJson = False) -> None:
    """Print what dp-accounting, autodp and Opacus say about an event, beside ours (add-remove)."""
    from privtune.accounting.compare import compare

    found = compare(_read(event_file), delta)
    if as_json:
        emit_json(found.to_dict())
        return
    rows = [("PrivTune", show_cost(found.ours.epsilon), found.ours.method)]
    for answer in found.others:
        shown = "cannot" if answer.epsilon is None else show_cost(answer.epsilon)
        rows.append((answer.tool, shown, answer.why))
    show_table(("accountant", "epsilon", "why ours differs, or why it cannot"), rows)
    say(f"At δ = {delta:g}. Some mechanism with this event costs {_least(found.lower)}.")


@app.command("sensitivity")
def sensitivity_command(
    event_file: EventFile,
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print what one more run, a cap, other noise, a smaller delta or another share would cost or save."""
    from privtune.accounting import Adjacency
    from privtune.accounting.costs import sensitivity, shares_of_scores

    event = _read(event_file)
    found = sensitivity(event, delta, adjacency=Adjacency(adjacency))
    shares = shares_of_scores(event, found.guarantee)
    if as_json:
        more = {"shares": [row.to_dict() for row in shares]} if shares else {}
        emit_json(found.to_dict() | more)
        return
    say(f"ε = {show_cost(found.guarantee.epsilon)} at δ = {delta:g}. Would be:")
    show_changes(found)
    if shares:
        say("Scores on records of their own, at the same ε of the whole:")
        rows = [
            (
                f"{row.share:g}",
                f"x {row.noise_factor:.4f}",
                ", ".join(f"{value:.4g}" for value in row.noise_multipliers),
            )
            for row in shares
        ]
        columns = ("share of the scores", "noise of the rest", "noise multipliers of the scores")
        show_table(columns, rows)
