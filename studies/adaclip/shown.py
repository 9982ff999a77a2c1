"""What the lines of this study show: the paper's numbers beside them, tables, charts."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from privtune.plots import plot_lines
from studies.sheet import Row, by, markdown, mean, pm

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["charts", "figures", "tables"]

PAPER = list(
    csv.DictReader((Path(__file__).parent / "paper.csv").read_text(encoding="utf-8").splitlines())
)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of every arm over the seeds that did not choose."""
    found = {}
    for (part, at, arm, steps), group in by(fresh(rows), "part", "at", "arm", "steps").items():
        after = f" after {steps} steps" if steps else ""
        found[f"{part}, {arm} at {float(at):g}{after}"] = mean(group, "value")
    return found


def fresh(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of seeds that did not choose."""
    return [row for row in rows if row["seed"] != "grid"]


def tables(rows: Sequence[Row]) -> list[str]:
    """Return what the paper has beside what was measured, and what shows why they differ."""
    parts_of = by(fresh(rows), "part")
    found = []
    for (part,), group in parts_of.items():
        if part == "theorem 2":
            found.append(_theorem(group))
            continue
        if part == "noise in the logits":
            lines = [
                (at, pm(of, "noise", digits=2), pm(of, "value", digits=2))
                for (at,), of in by(group, "at").items()
            ]
            head = (
                "told over a norm of 4: steps",
                "squared length of the noise",
                "variance of logits",
            )
            found.append(markdown(head, lines))
            continue
        if part == "momentum":
            lines = [
                (each["arm"], pm(of, "value", digits=2), each["rate"], len(of))
                for of in by(group, "arm").values()
                for each in of[:1]
            ]
            found.append(markdown((part, "accuracy", "rate", "seeds"), lines))
            continue
        digits = 3 if part == "regression" else 2
        arms = [arm for (arm,) in by(_drawn(group), "arm")]
        told = {arm: _told(part, arm) for arm in arms}
        head = [
            ("d" if part == "regression" else "ε"),
            *itertools.chain.from_iterable(
                ([f"{arm}, paper", arm] if told[arm] else [arm]) for arm in arms
            ),
        ]
        lines = []
        for (at,), of in sorted(by(group, "at").items(), key=lambda pair: float(pair[0][0])):
            line = [f"{float(at):g}"]
            for arm in arms:
                own = by(of, "arm").get((arm,), [])
                line += [told[arm].get(float(at), "")] if told[arm] else []
                line.append(pm(own, "value", digits=digits) if own else "")
            lines.append(line)
        found.append(markdown((f"{part}: {head[0]}", *head[1:]), lines))
    return [*found, *_paired(rows), *_noise(rows), *_rates(rows)]


def _drawn(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of arms that are no experiment beside Table 1, tried at ε = 2 alone."""
    return [
        row
        for of in by(rows, "part", "arm").values()
        for row in of
        if row["part"] != "table 1" or {float(each["at"]) for each in of} != {2.0}
    ]


def _theorem(rows: Sequence[Row]) -> str:
    """Return the mean squared gradient after some steps beside Theorem 2's bound on it."""
    lines = []
    for (at, steps), of in by(rows, "at", "steps").items():
        arms = [
            f"{pm(own, 'value', digits=3)} ≤ {own[0]['bound']}" for own in by(of, "arm").values()
        ]
        lines.append((at, steps, *arms))
    return markdown(("theorem 2: d", "steps", *(arm for (arm,) in by(rows, "arm"))), lines)


def _paired(rows: Sequence[Row]) -> list[str]:
    """Return Table 1's arms at ε = 2 against fixed clipping, seed by seed, and why they differ."""
    group = [r for r in fresh(rows) if (r["part"], float(r["at"])) == ("table 1", 2.0)]
    arms = {arm: of for (arm,), of in by(group, "arm").items() if arm not in _OTHER_SEEDS}
    base = {row["seed"]: float(row["value"]) for row in arms.get("fixed", [])}
    lines = []
    for arm, own in arms.items():
        of = [row for row in own if row["seed"] in base]
        if not of:
            continue
        less = [{"by": str(float(row["value"]) - base[row["seed"]])} for row in of]
        seen = [f"{float(of[0][name]):.2f}" if of[0][name] else "" for name in _SEEN]
        differs = "" if arm == "fixed" else pm(less, "by", digits=2)
        what = (pm(of, "value", digits=2), differs, of[0]["rate"], of[0]["h2"])
        lines.append((arm, len(of), *what, *seen))
    head = ("table 1 at ε = 2", "seeds", "accuracy", "minus fixed", "rate", "h₂")
    return [markdown((*head, "clipping", "noise", "evenness of s", "of the gradients' own"), lines)]


_OTHER_SEEDS = ("norm bound", "fixed, moments accountant")
_SEEN = ("clipped", "noise", "even", "own")


def _told(part: str, arm: str) -> dict[float, str]:
    return {
        float(row["at"]): f"{row['value']} ± {row['error']}"
        for row in PAPER
        if (row["part"], row["arm"]) == (part, arm)
    }


def _noise(rows: Sequence[Row]) -> list[str]:
    """Return what Figure 3 shows: what clipping and noise change of a mean gradient."""
    lines = []
    pair = ("fixed", "AdaCliP")
    told = by(
        [row for row in rows if row["noise"] and row["arm"] in pair and row["part"] == "table 2"],
        "at",
    )
    for (at,), of in sorted(told.items(), key=lambda pair: float(pair[0][0])):
        arms = {row["arm"]: row for row in of}
        if len(arms) < 2:
            continue
        pairs = [(float(row["clipped"]), float(row["noise"])) for row in arms.values()]
        both = [math.hypot(*pair) for pair in pairs]
        each = [f"{a:.2f} / {b:.2f} / {c:.2f}" for (a, b), c in zip(pairs, both, strict=True)]
        even = [arms["AdaCliP"][name] for name in ("even", "own")]
        lines.append((f"{float(at):g}", *each, f"{both[1] / both[0]:.2f}", "0.8", *even))
    head = (
        "clipping / noise / both: ε",
        "fixed",
        "AdaCliP",
        "ratio",
        "paper",
        "evenness of s",
        "of the gradients' own",
    )
    return [markdown(head, lines)] if lines else []


def _rates(rows: Sequence[Row]) -> list[str]:
    """Return what each candidate of fixed clipping came to, one run each."""
    found = []
    tried = [row for row in rows if row["seed"] == "grid" and row["arm"] == "fixed"]
    for (part,), group in by(tried, "part").items():
        columns = sorted({float(row["rate"]) for row in group})
        lines = []
        for (at,), of in sorted(by(group, "at").items(), key=lambda pair: float(pair[0][0])):
            own = {float(row["rate"]): row["value"] for row in of}
            lines.append((f"{float(at):g}", *(own.get(rate, "") for rate in columns)))
        found.append(markdown((f"{part}, fixed, by rate: ε", *columns), lines))
    return found


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the charts: the error by dimensions, and both tables by ε."""
    told = [{**row, "arm": f"{row['arm']}, paper"} for row in PAPER]
    by_part = by(fresh(rows), "part")
    found = {}
    if example := by_part.get(("regression",)):
        named = [{"d": row["at"], "squared distance": row["value"], **row} for row in example]
        found["regression"] = plot_lines(named, x="d", y="squared distance", line="arm", log="xy")
    # Momentum is one ε alone, and is not drawn.
    names = ("table 1", "table 2")
    tabled = [row for name in names for row in _drawn(by_part.get((name,), []))]
    shown = [*tabled, *(row for row in told if (row["part"],) in by_part)]
    named = [{"ε": row["at"], "accuracy": row["value"], **row} for row in shown]
    found["chart"] = plot_lines(named, x="ε", y="accuracy", line="arm", panel="part", log="x")
    # Room for the names of the axes above those of the lines.
    return {name: figure.update_layout(height=480) for name, figure in found.items()}
