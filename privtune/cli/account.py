"""``privtune account``: what an event costs, and the noise that meets a target.

These commands need neither data nor a budget, and charge nothing: an event is read from a file, and an
accountant answers. What costs is printed rounded up, so that it may be quoted; what is a lower bound is
rounded down.
"""

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


class BoundMethod(StrEnum):
    """The values of ``--method``: the best of our bounds, RDP or PLD alone, or autodp beside ours."""

    BEST = "best"
    RDP = "rdp"
    PLD = "pld"
    AUTODP = "autodp"


class Neighbours(StrEnum):
    """The values of ``--adjacency``, repeated here so that help need not import the accountants.

    Values are those of :class:`privtune.accounting.Adjacency`.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


OF_NUMBERS = (
    "An event is a file. The ε of a training's numbers alone: privtune account dpsgd --help."
)
"""What to do instead where the file of an event cannot be read, such as ``privtune account epsilon 1.1``."""

EventFile = Annotated[
    str,
    typer.Argument(
        metavar="EVENT.json",
        help="A JSON file that describes one event: its mechanisms, sampling and steps; - reads stdin. The "
        "documentation's page EVENT.json shows every kind.",
    ),
]
Delta = Annotated[float, typer.Option("--delta", help="Target delta, between 0 and 1.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Target epsilon.")]
AdjacencyOption = Annotated[
    Neighbours,
    typer.Option(
        "--adjacency",
        help="How neighbouring datasets differ: one record added or removed, or one record replaced. "
        "Under replace-one an event without a bound is refused, and a parallel event costs as much as its "
        "two most expensive parts together.",
    ),
]
MethodOption = Annotated[
    BoundMethod, typer.Option("--method", help="Which accountant computes the bound.")
]


def _read_event(source: str) -> Event:
    """Return the event of a file, or of standard input.

    Args:
        source: A path, or ``-``.

    Raises:
        InvalidInputError: The file cannot be read, is no JSON, or describes no event.
    """
    from privtune.accounting import event_from_json

    if source == "-":
        return event_from_json(sys.stdin.read())
    path = Path(source)
    try:
        text = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise InvalidInputError(
            "EVENT.json", source, f"cannot be read: {reason}", OF_NUMBERS
        ) from None
    return event_from_json(text)


def _show_lower_bound(value: float) -> str:
    """Return a lower bound on a cost or saving as text in six digits, rounded down."""
    return f"{-ceil_digits(-value, 6):.6g}" if math.isfinite(value) else "∞"


def _print_answer(
    answer: Guarantee, quantity: str, document: dict[str, Any], *, as_json: bool, reason: str = ""
) -> None:
    """Print an accountant's answer and all bounds that it was chosen from.

    Args:
        answer: The answer.
        quantity: Which of its numbers was computed, ``epsilon`` or ``delta``; the other is the target.
        document: The answer as JSON-ready data, with what else belongs to it. Its ``bounds`` are the
            rows of the table.
        as_json: Whether to print the document alone.
        reason: A sentence on why the answer is infinite, if it is.
    """
    if as_json:
        emit_json(document)
        return
    if quantity == "epsilon":
        line = f"ε = {show_cost(answer.epsilon)} at δ = {answer.delta:g}"
    else:
        line = f"δ = {show_cost(answer.delta)} at ε = {answer.epsilon:g}"
    say(f"{line} {_describe_bound(answer)}")
    if reason:
        say(reason)
    _explain_noise(answer)
    rows = [(name, _show_bound(name, bound)) for name, bound in document["bounds"].items()]
    show_table(("bound", quantity), rows)


def _show_bound(name: str, bound: float | str) -> str:
    """Return a bound as text: one named ``lower`` is rounded down, any other is rounded up.

    Args:
        name: The bound's; only ``lower`` is one from below.
        bound: Its value, or the text that stands in JSON for what is infinite.
    """
    if isinstance(bound, str):
        return bound
    return _show_lower_bound(bound) if name == "lower" else show_cost(bound)


def _describe_bound(answer: Guarantee) -> str:
    """Return an answer's adjacency and bound as text, such as ``(add-remove), by pld``.

    No bound is named where ε is infinite, as none decided.
    """
    method = answer.method.replace("_", " ")
    by = f", by {method}" if math.isfinite(answer.epsilon) else ""
    return f"({answer.adjacency.value}){by}"


def _explain_noise(answer: Guarantee) -> None:
    """Print what a noise multiplier is relative to, if an answer is under replace-one adjacency.

    Other libraries state them over the sensitivity to one record more or less. Whoever takes over a
    number from them would otherwise believe in twice the noise that there is.
    """
    if answer.adjacency.value == Neighbours.REPLACE_ONE.value:
        say(
            "Under replace-one a noise multiplier is over the sensitivity to a replacement, which may be "
            "twice that to one record more or less."
        )


def _why_infinite(event: Event, answer: Guarantee) -> str:
    """Return a sentence on why an ε is infinite if the event's δ is the cause, else an empty text.

    A part that is (ε, δ)-DP by declaration uses up its δ. Where one part has more of it than the target,
    or all together have, no accountant can answer, and only a larger target helps.
    """
    from privtune.accounting import ApproximateDP
    from privtune.accounting.events import flatten

    if math.isfinite(answer.epsilon):
        return ""
    deltas = {
        part.delta: count
        for part, count in flatten(event).items()
        if isinstance(part, ApproximateDP)
    }
    largest = max(deltas, default=0.0)
    total = sum(delta * count for delta, count in deltas.items())
    if total <= answer.delta:
        return ""
    excess = f"its parts have δ = {total:g}"
    if largest > answer.delta:
        excess = f"a part has δ = {largest:g}"
    return (
        f"No ε is enough: {excess}, which is above the target δ = {answer.delta:g}. "
        "Ask for a larger --delta."
    )


@app.command("epsilon")
def epsilon_command(
    event_file: EventFile,
    delta: Delta,
    method: MethodOption = BoundMethod.BEST,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print the epsilon of an event, by every bound that applies."""
    from privtune.accounting import Adjacency, lower_bound
    from privtune.accounting import epsilon as account_epsilon

    event = _read_event(event_file)
    if method is BoundMethod.AUTODP:
        _print_autodp(event, delta, Adjacency(adjacency), as_json=as_json)
        return
    answer = account_epsilon(event, delta, adjacency=Adjacency(adjacency), method=method.value)
    document = answer.to_dict()
    if method is not BoundMethod.RDP:
        # What an explicit instance costs: no valid bound lies below it.
        lower = lower_bound(event, delta, adjacency=Adjacency(adjacency))
        document["bounds"]["lower"] = lower if math.isfinite(lower) else "inf"
    reason = _why_infinite(event, answer)
    _print_answer(answer, "epsilon", document, as_json=as_json, reason=reason)


@app.command("dpsgd")
def dpsgd_command(  # noqa: PLR0917 (the command line passes them by name)
    records: Annotated[int, typer.Option("--records", help="Number of training records.")],
    batch: Annotated[int, typer.Option("--batch", help="Expected records in a batch.")],
    epochs: Annotated[
        float,
        typer.Option(
            "--epochs", help="Passes over the records. The number of steps is rounded up."
        ),
    ],
    delta: Delta,
    noise: Annotated[
        float | None,
        typer.Option(
            "--noise",
            help="Noise multiplier: standard deviation of the noise divided by the clipping norm. "
            "The command then prints epsilon.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--epsilon", help="Target epsilon. The command then prints the noise multiplier."
        ),
    ] = None,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print the epsilon of a DP-SGD training, or the noise for one."""
    from privtune.accounting import Adjacency, calibrate, dpsgd_event
    from privtune.accounting import epsilon as account_epsilon

    if (noise is None) == (epsilon is None):
        mistake = "Neither was given." if noise is None else "Both were given."
        raise PrivTuneError(
            "Give --noise to learn the epsilon that it costs, or --epsilon to learn the noise that "
            f"meets it. {mistake}"
        )
    neighbours = Adjacency(adjacency)
    multiplier = 1.0 if noise is None else noise
    training = dpsgd_event(
        records=records, expected_batch_size=batch, noise_multiplier=multiplier, epochs=epochs
    )
    event: Event = training
    if epsilon is None:
        answer = account_epsilon(event, delta, adjacency=neighbours)
    else:
        calibration = calibrate(event, epsilon=epsilon, delta=delta, adjacency=neighbours)
        answer = calibration.guarantee
        event = calibration.event
        # The noise of the event that was scaled is 1.
        multiplier = calibration.scale
    if as_json:
        numbers = {
            "noise_multiplier": multiplier,
            "steps": training.count,
            "sampling": "poisson",
            "rate": batch / records,
        }
        emit_json({**numbers, **answer.to_dict(), "event": event.to_dict()})
        return
    cost = f"ε = {show_cost(answer.epsilon)} at δ = {delta:g} {_describe_bound(answer)}"
    say(cost if epsilon is None else f"noise multiplier = {show_cost(multiplier)}: {cost}")
    say(
        f"Assumes Poisson sampling: each of {training.count:,} steps draws every record with probability "
        f"{batch}/{records}. Shuffled batches of a fixed size are not covered."
    )
    _warn_of_large_delta(delta, records)


def _warn_of_large_delta(delta: float, records: int) -> None:
    """Print a warning if δ is above 0.1 / ``records``, with the δ that is usual."""
    # A δ that was computed as 0.1 / records must not be warned of for its last digit.
    if delta * records <= 0.1 * (1 + 1e-9):
        return
    usual_delta = 10.0 ** math.floor(math.log10(0.1 / records))
    share = "one" if delta * records > 1.0 else "a tenth of one"
    say(
        f"δ = {delta:g} is above {share} over the {records:,} records. A program that publishes one "
        f"random record in full satisfies δ = {1 / records:.2g}: take δ = {usual_delta:g}, or less."
    )


def _print_autodp(event: Event, delta: float, adjacency: Adjacency, *, as_json: bool) -> None:
    """Print the ε that autodp computes for an event, with our own bounds beside it.

    Args:
        event: The event.
        delta: The target δ.
        adjacency: The relation of neighbouring datasets.
        as_json: Whether to print one JSON document.

    Raises:
        PrivTuneError: A lower bound contradicts our ε. The answer is printed first, for the report of it.
    """
    from privtune.accounting import Guarantee
    from privtune.accounting.compare import AUTODP, ask_witnesses, autodp_epsilon

    theirs = autodp_epsilon(event, delta, adjacency=adjacency)
    testimony = ask_witnesses(event, delta, adjacency=adjacency)
    bounds = {"autodp": theirs, "rdp": testimony.composed, "best of ours": testimony.ours}
    answer = Guarantee(theirs, delta, "autodp", adjacency, bounds)
    document = {
        **answer.to_dict(),
        "why": next(witness.why for witness in testimony.witnesses if witness.tool == AUTODP),
        "objection": testimony.objection,
    }
    lower = testimony.lower
    document["bounds"]["lower"] = lower if math.isfinite(lower) else "inf"
    _print_answer(answer, "epsilon", document, as_json=as_json)
    if testimony.objection:
        raise PrivTuneError(testimony.objection)


@app.command("delta")
def delta_command(
    event_file: EventFile,
    epsilon: Epsilon,
    method: MethodOption = BoundMethod.BEST,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print the delta of an event, by every bound that applies."""
    from privtune.accounting import Adjacency
    from privtune.accounting import delta as account_delta

    event = _read_event(event_file)
    answer = account_delta(event, epsilon, adjacency=Adjacency(adjacency), method=method.value)
    _print_answer(answer, "delta", answer.to_dict(), as_json=as_json)


@app.command("calibrate")
def calibrate_command(
    event_file: EventFile,
    epsilon: Epsilon,
    delta: Delta,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Scale the noise of an event until it meets a target. Prints the event."""
    from privtune.accounting import Adjacency, calibrate

    event = _read_event(event_file)
    calibration = calibrate(event, epsilon=epsilon, delta=delta, adjacency=Adjacency(adjacency))
    answer = calibration.guarantee
    event_document = calibration.event.to_dict()
    if as_json:
        emit_json(
            {
                "event": event_document,
                "scale": calibration.scale,
                "guarantee": answer.to_dict(),
            }
        )
        return
    # Rounded up: with the printed factor, too, the event meets the target.
    scale = f"{ceil_digits(calibration.scale, 6):.6g}"
    cost = f"ε = {show_cost(answer.epsilon)} at δ = {delta:g}"
    say(f"noise × {scale}: {cost} {_describe_bound(answer)}")
    _explain_noise(answer)
    console().print_json(data=event_document)


@app.command("explain")
def explain_command(
    event_file: EventFile,
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print a tree that shows where epsilon comes from."""
    from privtune.accounting import Adjacency, explain

    tree = explain(_read_event(event_file), delta, adjacency=Adjacency(adjacency))
    if as_json:
        emit_json({"delta": delta, "adjacency": adjacency.value, "tree": tree.to_dict()})
        return
    _print_tree(tree)
    say(
        f"Each line is the ε of one part alone, at δ = {delta:g}; the total is their composition, "
        "not their sum. “Saves” is what the total would fall by without the part. “At least” is a lower "
        "bound: some mechanism with this event costs that much."
    )


def _print_tree(node: Explanation, depth: int = 0) -> None:
    """Print the ε of a part of an event and, indented below, the ε of its own parts.

    Args:
        node: The part; its numbers are ε at the δ of the whole tree.
        depth: How many parts it lies within.
    """
    saving = ""
    if node.saved is not None:
        saving = f", saves {_show_lower_bound(node.saved)}"
    lower = ""
    if node.lower is not None:
        lower = f", at least {_show_lower_bound(node.lower)}"
    indent = "    " * depth
    say(f"{indent}ε = {show_cost(node.epsilon)}  {node.text} ({node.method}{saving}{lower})")
    for child in node.children:
        _print_tree(child, depth + 1)


@app.command("compare")
def compare_command(event_file: EventFile, delta: Delta = 1e-5, as_json: AsJson = False) -> None:
    """Print what dp-accounting, autodp and Opacus say of an event. Ours stands beside it (add-remove)."""
    from privtune.accounting.compare import compare

    comparison = compare(_read_event(event_file), delta)
    if as_json:
        emit_json(comparison.to_dict())
        return
    ours = comparison.ours
    rows = [("PrivTune", show_cost(ours.epsilon), ours.method)]
    for answer in comparison.others:
        epsilon = "none" if answer.epsilon is None else show_cost(answer.epsilon)
        rows.append((answer.tool, epsilon, answer.why))
    show_table(("accountant", "epsilon", "why PrivTune differs, or why there is no answer"), rows)
    say(
        f"All at δ = {delta:g}. Lower bound: some mechanism with this event costs ε = "
        f"{_show_lower_bound(comparison.lower)}, so no valid accountant answers less."
    )


@app.command("sensitivity")
def sensitivity_command(
    event_file: EventFile,
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = Neighbours.ADD_REMOVE,
    as_json: AsJson = False,
) -> None:
    """Print how ε changes with the numbers of an event.

    They are one more run, a cap on runs, other noise, a smaller δ and other shares.
    """
    from privtune.accounting import Adjacency
    from privtune.accounting.costs import sensitivity, shares_of_scores

    event = _read_event(event_file)
    changes = sensitivity(event, delta, adjacency=Adjacency(adjacency))
    guarantee = changes.guarantee
    shares = shares_of_scores(event, guarantee)
    if as_json:
        document = changes.to_dict()
        if shares:
            document["shares"] = [row.to_dict() for row in shares]
        emit_json(document)
        return
    say(f"ε = {show_cost(guarantee.epsilon)} at δ = {delta:g}. With one change it would be:")
    show_changes(changes)
    if shares:
        say("With scores on a separate split (not the training records), and the same total ε:")
        rows = []
        for row in shares:
            multipliers = ", ".join(f"{value:.4g}" for value in row.noise_multipliers)
            rows.append((f"{row.share:g}", f"x {row.noise_factor:.4f}", multipliers))
        columns = ("share of the scores", "noise of the rest", "noise multipliers of the scores")
        show_table(columns, rows)
