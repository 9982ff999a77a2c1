"""Fine-tune an encoder on labelled texts, by its head, biases or adapters, by every strategy.

python -m studies.fine_tuning_text.run                                  # generated sentences
python -m studies.fine_tuning_text.run --data texts.json --out own.csv  # texts of one's own
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_results
from studies.fine_tuning_text import heads
from studies.fine_tuning_text.task import SETTINGS, generated, public_weights
from studies.sheet import Again, Options, Row, Sheet, by, markdown, mean, most_spent, pm, release_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

NORM = {"max_grad_norm": 0.1}  # Adam does not see the scale of its gradients
SPACE = {"learning_rate": {"type": "float", "low": 1e-4, "high": 3e-2, "log": True}}
PARTS, ANY, HEADS = ("head", "biases", "lora:4"), "any", "head of a frozen encoder"
SEARCH = {"strategy": "papernot-steinke", "method": "dp-adam", "parameters": NORM, "mean_runs": 5}
FIXED = {"learning_rate": 1e-3, **NORM}
ARMS: dict[str, dict[str, Any]] = {
    "hyfreedp": {"strategy": "hyfreedp"},
    "defaults": {"strategy": "fixed", "method": "dp-adam", "parameters": FIXED},
    "papernot-steinke": SEARCH,
    "papernot-steinke, parts": SEARCH,  # searches the part, too: the lines of "any"
}


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield heads by every method, then every arm on every part; on generated sentences few."""
    own = on_own_texts(options)
    for epsilon in (1.0, 3.0, 8.0) if own else (3.0,):
        for arm in heads.METHODS if own else ("public-rate",):
            yield {"trainable": HEADS, "epsilon": epsilon, "arm": arm}
    for epsilon in (1.0, 3.0) if own else (3.0,):
        for arm in ARMS if own else (*ARMS,)[::3]:
            for part in (ANY,) if arm.endswith("parts") else PARTS if own else PARTS[2:]:
                yield {"trainable": part, "epsilon": epsilon, "arm": arm}


def on_own_texts(options: Options) -> bool:
    """Return whether texts were given, and are to be read."""
    return options.data is not None and not options.smoke


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm in studies of its own, or train heads by one method, with every seed."""
    own, size = on_own_texts(options), {"epochs": 3, "expected_batch_size": 256}
    if not own:
        os.environ[SETTINGS], size = str(generated()), {"epochs": 0.5, "expected_batch_size": 128}
    if cell["trainable"] == HEADS:
        return heads.train_heads(cell["arm"], cell["epsilon"])
    arm, part = ARMS[cell["arm"]], cell["trainable"]
    space = dict(SPACE) if "mean_runs" in arm else {}
    if part == ANY:
        space["trainable"] = {"type": "categorical", "choices": list(PARTS)}
    task = {
        "type": "fine-tuning",
        "task": "studies.fine_tuning_text.task:texts",
        "pretrained": str(public_weights()),
        "trainable": "all" if part == ANY else part,
    }
    terms = {"task": task, "space": space, "epsilon": cell["epsilon"], "delta": 1e-5, **size}
    seeds = range(3 if own else 1)
    return [{"seed": seed, **release_of(arm, seed=seed, **terms)} for seed in seeds]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every arm on every part, and what was spent at most."""
    found = {
        f"{arm}, {part}, ε = {float(epsilon):g}": 100.0 * mean(of, "accuracy")
        for (part, epsilon, arm), of in by(rows, "trainable", "epsilon", "arm").items()
    }
    return {**found, **most_spent(rows)}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the accuracies: a line an arm, a column a part and ε."""
    columns = list(by(rows, "trainable", "epsilon"))
    lines = []
    for (arm,), of in by(rows, "arm").items():
        at = by(of, "trainable", "epsilon")
        lines.append(
            (arm, *(pm(at[c], "accuracy", scale=100.0) if c in at else "–" for c in columns))
        )
    heads = (f"{part}, ε = {float(epsilon):g}" for part, epsilon in columns)
    return [markdown(("test accuracy, %", *heads), lines)]


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return accuracy against ε, a panel a part."""
    return {"chart": plot_results([{**row, "task": row["trainable"]} for row in rows])}


SHEET = Sheet(
    name="fine_tuning_text",
    key=("trainable", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed", "rate"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again({"arm": "public-rate", "trainable": HEADS}, "accuracy", stand_in=True),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
