"""What `auto` loses on tasks that its rule was not read off: its regret against the best arm.

python -m studies.auto.run --data mnist.npz     # goes on where it was; needs statsmodels and texts
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_results
from studies.auto.tasks import DEVELOPMENT, FIFTH, FIRST, FOURTH, GENERATED, MADE, SECOND, THIRD
from studies.sheet import (
    Again,
    Options,
    Row,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    most_spent,
    pm,
    releases_of,
    seed_of,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

CLIP = {"max_grad_norm": 1.0}
SEARCH = {"mean_runs": 10, "parameters": CLIP}
ARMS: dict[str, dict[str, Any]] = {
    "auto": {"strategy": "auto"},
    "fixed": {"strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}},
    "hyfreedp": {"strategy": "hyfreedp"},
    "adadp": {"strategy": "adadp", "parameters": CLIP},
    "prodigy": {"strategy": "prodigy"},
    "public-rate": {"strategy": "public-rate"},
    "papernot-steinke": {"strategy": "papernot-steinke", **SEARCH},
    "subsampled-tuning": {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, **SEARCH},
}
SPREADS = {"5": ARMS["hyfreedp"]} | {
    text: {**ARMS["hyfreedp"], "spread": float(text)} for text in ("3", "12", "25", "100")
}
FALLING = {**ARMS["fixed"], "options": {"schedule": {"type": "linear", "start": 0.7}}}
GIVEN = {"fixed": ARMS["fixed"], "fixed, falling": FALLING}
BEFORE = {  # what ``auto`` took before: arms of their own, on the sets until the rule after them
    "third rule": ("first", "second", "third", "fourth"),
    "fourth rule": ("fourth", "fifth"),
}
SPACE = {"learning_rate": {"type": "float", "low": 0.05, "high": 5.0, "log": True}}
BUILT_IN: dict[str, dict[str, Any]] = {
    "digits-mlp": {"epochs": 20, "expected_batch_size": 64},
    "digits-cnn": {"epochs": 20, "expected_batch_size": 64},
    "synthetic-logistic": {"epochs": 5, "expected_batch_size": 128},
    "iris-logistic": {"epochs": 20, "expected_batch_size": 30},
}
SETS = {
    "fifth": tuple(FIFTH),
    "fourth": tuple(FOURTH),
    "third": tuple(THIRD),
    "second": tuple(SECOND),
    "first": tuple(FIRST),
    "development": (*BUILT_IN, *DEVELOPMENT),
}
FIRST_RULE = {  # what the first rule took, at either ε
    "cancer": "adadp",
    "diabetes": "papernot-steinke",
    "fair": "papernot-steinke",
    "randhie": "adadp",
    "moons": "papernot-steinke",
    "classes-50k": "subsampled-tuning",
    "even or odd": "adadp",
    "wine": "adadp",
    "anes96": "papernot-steinke",
    "classes-2k": "adadp",
    "classes-30k": "subsampled-tuning",
    "quantiles": "adadp",
    "turned": "adadp",
}
EPSILONS, DELTA, SEEDS = (1.0, 4.0), 1e-5, 10
REPEATS = {"fifth": 20, "fourth": 20, "generated": 4}  # of the other sets, ``SEEDS``
# Where the rule's spread is 25, 12 and 5 for features of a scale of 0.5.
REACHES = (200.0, 417.0, 1_000.0, math.inf)
FEW = 500.0  # records times ε, of the rules from the second on
UNITS = 2**1074  # parts of 1 that every float is a whole number of
HALVES = 252  # halves of the seeds that name an arm, at most: all of ten seeds'


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task, set by set, those of one training first."""
    if options.smoke:
        for arm in ("fixed", "hyfreedp", "auto"):
            yield {"set": "first", "task": "cancer", "epsilon": 4.0, "arm": arm}
        return
    for group, tasks in SETS.items():
        for arm, epsilon, task in itertools.product(ARMS, EPSILONS, tasks):
            yield {"set": group, "task": task, "epsilon": epsilon, "arm": arm}
    for arm, groups in BEFORE.items():
        for group in groups:
            for epsilon, task in itertools.product(EPSILONS, SETS[group]):
                yield {"set": group, "task": task, "epsilon": epsilon, "arm": arm}
    for epsilon, task in itertools.product(EPSILONS, GENERATED):
        few = GENERATED[task].sizes.train * epsilon < FEW
        for arm in GIVEN if few else SPREADS:
            yield {"set": "generated", "task": task, "epsilon": epsilon, "arm": arm}


def terms_of(task: str) -> dict[str, Any]:
    """Return what a spec says of a task and its training."""
    if task in BUILT_IN:
        return {"task": task, **BUILT_IN[task]}
    factory = task.replace("-", "_").replace(" ", "_")
    return {"task": f"studies.auto.tasks:{factory}", **MADE[task].terms}


def before(rule: str, task: str, epsilon: float) -> dict[str, Any]:
    """Return what the third or the fourth rule took, as a spec has it."""
    made = MADE[task]
    if second_rule(task, epsilon) == "fixed":
        return ARMS["fixed"] if rule == "third rule" else FALLING
    if len(made.layers) == 2:
        return ARMS["hyfreedp"]
    if rule == "third rule":
        least, spread = 5.0, 66_000.0 / (made.steps * math.sqrt(made.weights))
    else:
        least, spread = 3.0, 5_000.0 / math.sqrt(made.steps * made.weights)
    return {**ARMS["hyfreedp"], "spread": min(25.0, max(least, spread))}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task, once a seed."""
    terms = terms_of(cell["task"])
    if cell["arm"] in BEFORE:
        arm = before(cell["arm"], cell["task"], cell["epsilon"])
    else:
        arm = (ARMS | SPREADS | GIVEN)[cell["arm"]]
    if cell["arm"] == "auto" and cell["task"] in MADE:
        arm = {**arm, "feature_scale": MADE[cell["task"]].scale}
    if "mean_runs" in arm:
        terms["space"] = SPACE
    if options.smoke:
        terms["epochs"] = 1
    terms["repeats"] = 1 if options.smoke else REPEATS.get(cell["set"], SEEDS)
    terms["seed"] = seed_of(cell["task"], cell["epsilon"])  # its arms share it
    return releases_of(arm, epsilon=cell["epsilon"], delta=DELTA, **terms)


def second_rule(task: str, epsilon: float) -> str:
    """Return what the second rule took: from records and ε alone."""
    return "fixed" if MADE[task].sizes.train * epsilon < FEW else "hyfreedp"


class Cell:
    """The accuracies of all arms on one task at one ε, in percent: what `auto` lost there.

    Args:
        rows: Its lines, every arm with the same seeds.
        picked: The arm that a rule takes. The seven arms that know no rule, and this one, are compared.
    """

    def __init__(self, rows: Sequence[Row], picked: str) -> None:
        self.arms = {
            arm: [100.0 * value for value in floats(sorted(own, key=_seed), "accuracy")]
            for (arm,), own in by(rows, "arm").items()
            if arm == picked or arm not in ("auto", *BEFORE)
        }
        # In units of which a float is a whole number: hundreds of exact means are quick that way.
        self._units = {arm: [_units(value) for value in own] for arm, own in self.arms.items()}
        self.picked, self.seeds = picked, len(self.arms[picked])
        self.best = self._best(range(self.seeds))

    def _best(self, seeds: Sequence[int]) -> str:
        """Return the arm of the best mean; the one picked, where it is among several."""
        whole = len(seeds) * UNITS
        means = {arm: sum(own[s] for s in seeds) / whole for arm, own in self._units.items()}
        return max(means, key=lambda arm: (means[arm], arm == self.picked))

    def lost(self, arm: str, seeds: Sequence[int]) -> float:
        """Return how much better an arm was than the one picked, on average over seeds."""
        own, picked = self.arms[arm], self.arms[self.picked]
        return sum(_units(own[s] - picked[s]) for s in seeds) / (len(seeds) * UNITS)

    @property
    def regret(self) -> float:
        """Mean of the best arm less the mean of the picked one."""
        return self.lost(self.best, range(self.seeds))

    @property
    def error(self) -> float:
        """Standard error of the regret, as if the best arm had been known; arms draw independently."""
        if self.seeds < 2 or self.best == self.picked:
            return 0.0
        both = (self.arms[self.best], self.arms[self.picked])
        return math.sqrt(sum(statistics.variance(values) for values in both) / self.seeds)

    @property
    def regret_of_others(self) -> float:
        """Regret against the arm that is best on some seeds, measured on the others.

        The best of eight means is too high by their noise. Each half of the seeds names an arm (some of the
        halves where there are many); what it is ahead on the other half is free of that.
        """
        if self.seeds < 2:
            return self.regret
        parts, found = range(self.seeds), []
        step = max(1, math.comb(self.seeds, self.seeds // 2) // HALVES)
        halves = itertools.combinations(parts, self.seeds // 2)
        for some in itertools.islice(halves, 0, None, step):
            others = [seed for seed in parts if seed not in some]
            found.append(self.lost(self._best(some), others))
        return statistics.mean(found)


def _units(value: float) -> int:
    """Return a float as a whole number of parts of 1, exactly."""
    above, below = value.as_integer_ratio()
    return above * (UNITS // below)


def _seed(row: Row) -> float:
    return float(row["seed"])


RULES: dict[str, Callable[[str, float], str]] = {
    "first": lambda task, _: FIRST_RULE.get(task, ""),
    "second": second_rule,
    "third": lambda *_: "third rule",
    "fourth": lambda *_: "fourth rule",
    "fifth": lambda *_: "auto",
}
# A rule, and a set that nobody had run when it was fixed.
UNSEEN = {("first", "first"), ("first", "second"), ("second", "second")}
UNSEEN |= {("second", "third"), ("third", "third")}
UNSEEN |= {(rule, "fourth") for rule in ("second", "third", "fourth")}
UNSEEN |= {(rule, "fifth") for rule in ("second", "fourth", "fifth")}
LAST = ("fifth", "fifth")  # the rule as it is, on what it never saw: shown cell by cell


def compared(rows: Sequence[Row], rule: str, group: str) -> dict[tuple[str, str], Cell]:
    """Return the cells of a set by task and ε, with what a rule takes."""
    own = by([row for row in rows if row["set"] == group], "task", "epsilon")
    picked = {at: RULES[rule](at[0], float(at[1])) for at in own}
    return {
        at: Cell(of, picked[at]) for at, of in own.items() if picked[at] in {r["arm"] for r in of}
    }


def summed(every: Sequence[Cell]) -> dict[str, float]:
    """Return mean and worst regret over cells, in points."""
    return {
        "mean regret": statistics.mean(cell.regret for cell in every),
        "its standard error": math.hypot(*(cell.error for cell in every)) / len(every),
        "worst regret": max(cell.regret for cell in every),
        "mean regret on other seeds": statistics.mean(cell.regret_of_others for cell in every),
    }


def _found(rows: Sequence[Row]) -> dict[tuple[str, str], dict[tuple[str, str], Cell]]:
    sets = ("first", "second", "third", "fourth", "fifth")
    every = {at: compared(rows, *at) for at in itertools.product(RULES, sets)}
    return {at: cells_of for at, cells_of in every.items() if cells_of}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return mean and worst regret of each rule on each set, and the accuracy of every arm."""
    found = {
        f"{name}, {rule} rule, {group} set": value
        for (rule, group), known in _found(rows).items()
        for name, value in summed(list(known.values())).items()
    }
    named = [row for row in rows if row["set"] != "generated" and row["arm"] not in BEFORE]
    for (task, epsilon, arm), own in by(named, "task", "epsilon", "arm").items():
        found[f"{arm} on {task} at ε = {float(epsilon):g}"] = 100.0 * mean(own, "accuracy")
    for where, gains in spread_gains(rows).items():
        found |= {f"spread {arm}, {where}": gain for arm, gain in gains.items()}
    found |= {f"{arm}, few records": value for arm, value in given_few(rows).items()}
    return {**found, **most_spent(rows)}


def _generated(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the mean accuracy of each arm on each generated network at each ε, in percent."""
    of = by([row for row in rows if row["set"] == "generated"], "task", "epsilon")
    return {
        at: {arm: 100.0 * mean(own, "accuracy") for (arm,), own in by(every, "arm").items()}
        for at, every in of.items()
    }


def _where(task: str) -> str:
    """Return in which line of the table of spreads a network stands."""
    if task.startswith("unit"):
        return "inputs of length 1"
    reach = math.sqrt(GENERATED[task].steps * GENERATED[task].weights)
    edge = next(edge for edge in REACHES if reach <= edge)
    return f"up to {edge:,.0f}" if edge < math.inf else "above"


def spread_gains(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return what each spread adds to HyFreeDP's own on generated networks, by steps times weights."""
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (task, _), means in _generated(rows).items():
        if set(means) == set(SPREADS):
            parts[_where(task)].append({arm: means[arm] - means["5"] for arm in SPREADS})
    return {
        where: {arm: statistics.mean(each[arm] for each in every) for arm in SPREADS}
        | {"cells": float(len(every))}
        for where, every in sorted(parts.items(), key=lambda part: _ORDER.index(part[0]))
    }


_ORDER = [*(f"up to {edge:,.0f}" for edge in REACHES[:-1]), "above", "inputs of length 1"]


def given_few(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean accuracy of given hyperparameters on generated networks with few records."""
    every = [means for means in _generated(rows).values() if set(means) == set(GIVEN)]
    found = {arm: statistics.mean(means[arm] for means in every) for arm in GIVEN} if every else {}
    return found | {"cells": float(len(every))}


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the regrets of rules by set, cell by cell where the set was unseen, and all means."""
    head = ("rule", "set", "cells", "mean regret", "mean regret on other seeds", "worst regret")
    found, lines = _found(rows), []
    for (rule, group), known in found.items():
        one = summed(list(known.values()))
        regret = f"{one['mean regret']:.2f} ± {one['its standard error']:.2f}"
        rest = (f"{one['mean regret on other seeds']:.2f}", f"{one['worst regret']:.2f}")
        seen = "unseen" if (rule, group) in UNSEEN else "seen before the rule"
        lines.append((rule, f"{group}, {seen}", len(known), regret, *rest))
    made = [markdown(head, lines)]
    for rule, group in (at for at in found if at == LAST):
        head = (f"{rule} rule, {group} set", "ε", "takes", "mean", "best arm", "mean", "regret")
        lines = [
            (
                task,
                f"{float(epsilon):g}",
                cell.picked,
                _pm(cell.arms[cell.picked]),
                cell.best,
                _pm(cell.arms[cell.best]),
                f"{cell.regret:.1f} ± {cell.error:.1f}" if cell.regret else "0",
            )
            for (task, epsilon), cell in found[rule, group].items()
        ]
        made.append(markdown(head, lines))
    others = [arm for arm in sorted(SPREADS, key=float) if arm != "5"]
    head = ("√(steps × weights)", "cells", *(f"spread {arm}" for arm in others))
    lines = [
        (where, f"{gains['cells']:.0f}", *(f"{gains[arm]:+.1f}" for arm in others))
        for where, gains in spread_gains(rows).items()
    ]
    made.append(markdown(head, lines))
    few = given_few(rows)
    if few["cells"]:
        line = (f"{few['cells']:.0f}", *(f"{few[arm]:.1f}" for arm in GIVEN))
        made.append(markdown(("cells of networks with few records", *GIVEN), [line]))
    for (group,), of in by([r for r in rows if r["set"] != "generated"], "set").items():
        lines = []
        for (task, epsilon), own in by(of, "task", "epsilon").items():
            arms = by(own, "arm")
            shown = (
                pm(arms[arm,], "accuracy", scale=100.0) if (arm,) in arms else "" for arm in ARMS
            )
            lines.append((task, f"{float(epsilon):g}", *shown))
        made.append(markdown((f"all arms, {group} set", "ε", *ARMS), lines))
    return made


def _pm(values: Sequence[float]) -> str:
    spread = (
        f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    )
    return f"{statistics.mean(values):.1f}{spread}"


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return the chart: accuracy against ε, a panel a task of the set that was run last."""
    own = [row for row in rows if row["set"] == LAST[1] and row["arm"] not in BEFORE]
    return {"chart": plot_results(own)}


SHEET = Sheet(
    name="auto",
    key=("set", "task", "epsilon", "arm"),
    values=("seed", "accuracy", "gradient_evaluations", "spent", "claimed"),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        lines={"set": "fifth", "task": "currents", "epsilon": "1.0", "arm": "auto"},
        value="accuracy",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
