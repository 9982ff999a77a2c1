"""Ways of choosing hyperparameters, each with SGD and with Adam: what search, fit and optimizer are worth.

python -m studies.two_factors.run --data mnist.npz        # goes on where it was; minilm.npz beside it
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from privtune.plots import plot_lines
from privtune.study.schedules import with_rule
from privtune.study.spec import StudySpec
from studies.estimates import Estimate, contenders
from studies.sheet import (
    STRATEGY_OF,
    Again,
    Options,
    Row,
    Sheet,
    by,
    floats,
    markdown,
    mean,
    most_spent,
    releases_of,
    seed_of,
)
from studies.transfer.task import public_weights
from studies.two_factors.six import FINE_TUNING, SIX
from studies.two_factors.tasks import TWELVE

if TYPE_CHECKING:
    import plotly.graph_objects as go

HERE = "studies.two_factors.tasks"
SGD, ADAM, OWN = "SGD", "Adam", "own"
METHODS = {SGD: "dpsgd", ADAM: "dp-adam"}
CLIP = {"max_grad_norm": 1.0}
GUESSED = {SGD: 0.5, ADAM: 0.01}  # rates
PUBLIC = {"learning_rate": {"prior": "public"}}
LAW = {"min_runs": 2, "mean_runs": 8}
DELTA, REPEATS = 1e-5, 10
EPSILONS = {
    "six": (2.0, 0.5, 8.0, 1.0, 4.0),
    "twelve": (1.0, 4.0),
}  # in the order in which they run
PASSES = {
    "digits": 20,
    "table": 20,
    "minilm": 20,
    "mnist cnn": 20,
    "transfer": 10,
    "mnist mlp": 10,
}
"""Over the records, that one training on one of the six tasks may spend."""
METRICS = {
    "accuracy": "accuracy",
    "loss": "loss",  # nats
    "overconfidence": f"{HERE}:overconfidence",
}
BOUND = 20.0  # of a record's log loss


def _guess(optimizer: str) -> dict[str, Any]:
    parameters = {"learning_rate": GUESSED[optimizer], **CLIP}
    return {"strategy": "fixed", "parameters": parameters}


def _public_rate(_: str) -> dict[str, Any]:
    return {"strategy": "public-rate"}


def _selection(_: str) -> dict[str, Any]:
    return {"strategy": "papernot-steinke", **LAW, "parameters": CLIP}


def _subsampled(_: str) -> dict[str, Any]:
    return {"strategy": "subsampled-tuning", "variant": 1, "rate": 0.1, **LAW, "parameters": CLIP}


def _subset_search(_: str) -> dict[str, Any]:
    return {"strategy": "subset-search", "parameters": CLIP}


FALLING: dict[str, Callable[[str], dict[str, Any]]] = {
    # Their rate falls to 0; each with SGD and with Adam.
    "guess": _guess,
    "public rate": _public_rate,
    "selection": _selection,
    "subsampled tuning": _subsampled,
    "subset search": _subset_search,
}
SEARCHES = ("selection", "subsampled tuning", "subset search")
SINGLE: dict[tuple[str, str], dict[str, Any]] = {
    ("hyfreedp", SGD): {"strategy": "hyfreedp", "optimizer": "sgd"},
    ("hyfreedp", ADAM): {"strategy": "hyfreedp"},
    ("adadp", OWN): {"strategy": "adadp", "parameters": CLIP},
    ("adaclip", OWN): {
        "strategy": "adaclip",
        "parameters": {"learning_rate": 0.5, "largest_variance": 3e-3},
    },
    ("prodigy", OWN): {"strategy": "prodigy"},
    ("auto", OWN): {"strategy": "auto"},
}


def arm_of(way: str, optimizer: str) -> dict[str, Any]:
    """Return an arm as a spec has it."""
    if (way, optimizer) in SINGLE:
        return SINGLE[way, optimizer]
    arm = {**FALLING[way](optimizer), "method": METHODS[optimizer]}
    if arm["strategy"] == "public-rate":
        return {**arm, "schedule": "linear"}
    return {**arm, "options": {"schedule": "linear"}}


ARMS: dict[tuple[str, str], dict[str, Any]] = {
    pair: arm_of(*pair) for pair in [*product(FALLING, METHODS), *SINGLE]
}


def name_of(way: str, optimizer: str) -> str:
    """Return an arm's name in tables."""
    return way if optimizer == OWN else f"{way}, {optimizer}"


def cells(options: Options) -> Iterator[dict[str, Any]]:
    """Yield every arm on every task, the cheap tasks first."""
    if options.smoke:
        for way, optimizer in (("public rate", SGD), ("hyfreedp", ADAM)):
            yield _cell("six", "table", 4.0, way, optimizer)
        return
    cheap, dear = tuple(PASSES)[:3], tuple(PASSES)[3:]
    for group, tasks in (("six", cheap), ("twelve", tuple(TWELVE)), ("six", dear)):
        for epsilon, task, (way, optimizer) in product(EPSILONS[group], tasks, ARMS):
            yield _cell(group, task, epsilon, way, optimizer)


def _cell(group: str, task: str, epsilon: float, way: str, optimizer: str) -> dict[str, Any]:
    return {
        "set": group,
        "task": task,
        "epsilon": epsilon,
        "way": way,
        "optimizer": optimizer,
    }


def task_of(group: str, task: str, options: Options) -> Any:
    """Return a task as a spec names it."""
    if group == "twelve":
        return f"{HERE}:{task}"
    if task == "transfer":
        return {**FINE_TUNING, "pretrained": str(public_weights(16 if options.smoke else 64))}
    return SIX[task].task


@cache
def schedule_of(group: str, task: str, epsilon: float, options: Options) -> dict[str, Any]:
    """Return epochs and batch as the plan of HyFreeDP has them: all arms of a cell share them."""
    passes = PASSES[task] if group == "six" else TWELVE[task].passes
    if options.smoke:
        passes = 1
    spec = StudySpec.parse(
        {
            "name": "schedule",
            "task": task_of(group, task, options),
            "budget": {"name": "schedule", "epsilon": epsilon, "delta": DELTA},
            "arms": [{"name": "arm", "strategy": "hyfreedp"}],
            "epochs": "auto",
            "expected_batch_size": "auto",
        }
    )
    loaded = spec.load_task()
    work = passes * loaded.train_records
    chosen = with_rule(spec.model_copy(update={"compute": work}), loaded)
    return {"epochs": chosen.epochs, "expected_batch_size": chosen.expected_batch_size}


def fill(cell: Mapping[str, Any], options: Options) -> list[dict[str, Any]]:
    """Run one arm on one task."""
    group, task, epsilon = cell["set"], cell["task"], cell["epsilon"]
    arm = ARMS[cell["way"], cell["optimizer"]]
    schedule = schedule_of(group, task, epsilon, options)
    terms: dict[str, Any] = {"task": task_of(group, task, options), **schedule}
    if cell["way"] in SEARCHES:
        terms["space"] = PUBLIC
    lines = releases_of(
        arm,
        epsilon=epsilon,
        delta=DELTA,
        repeats=2 if options.smoke else REPEATS,
        seed=seed_of(task, epsilon),  # its arms share it
        values=tuple(METRICS),
        report={"metric": list(METRICS.values()), "bound": BOUND, "calibration": "none"},
        **terms,
    )
    return [{**line, **schedule} for line in lines]


def estimates(
    rows: Sequence[Row], column: str = "accuracy", scale: float = 100.0
) -> dict[tuple[str, str, float], dict[tuple[str, str], Estimate]]:
    """Return by set, task and ε the estimate of every arm, in percent unless scaled otherwise."""
    cells: dict[tuple[str, str, float], dict[tuple[str, str], Estimate]] = defaultdict(dict)
    for (group, task, epsilon, way, optimizer), of in by(
        rows, "set", "task", "epsilon", "way", "optimizer"
    ).items():
        values = [scale * value for value in floats(of, column)]
        if len(values) > 1:
            cells[group, task, float(epsilon)][way, optimizer] = Estimate.of([values])
    return cells


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the accuracy of every arm, and the most of its budget that any spent."""
    found = {
        f"{name_of(way, optimizer)} on {task} at ε = {float(epsilon):g}": 100.0
        * mean(of, "accuracy")
        for (task, epsilon, way, optimizer), of in by(
            rows, "task", "epsilon", "way", "optimizer"
        ).items()
    }
    return {**found, **most_spent(rows)}


Pair = tuple[tuple[str, str], tuple[str, str]]


def _pairs() -> Iterator[tuple[str, Pair]]:
    """Yield what is compared with what in the same cells, one optimizer at a time: the factors interact."""
    for way in FALLING:
        yield f"Adam, in the place of SGD: {way}", ((way, ADAM), (way, SGD))
    beside = (
        ("a public rate, in the place of a guess", "public rate", "guess"),
        ("the fit of HyFreeDP, beside a public rate", "hyfreedp", "public rate"),
        *((f"{search}, beside a public rate", search, "public rate") for search in SEARCHES),
        ("subsampled tuning, beside selection", "subsampled tuning", "selection"),
    )
    for (name, way, other), optimizer in product(beside, METHODS):
        yield f"{name}: {optimizer}", ((way, optimizer), (other, optimizer))
    yield "auto, beside HyFreeDP", (("auto", OWN), ("hyfreedp", ADAM))


WORTH: dict[str, Pair] = dict(_pairs())


def gains(rows: Sequence[Row], group: str, pair: Pair) -> dict[str, list[Estimate]]:
    """Return by task the differences of two arms in every cell of a set that has both."""
    one, other = pair
    by_task: dict[str, list[Estimate]] = defaultdict(list)
    for (of, task, _), arms in estimates(rows).items():
        if of == group and one in arms and other in arms:
            by_task[task].append(arms[one].minus(arms[other]))
    return dict(by_task)


def worth(rows: Sequence[Row], group: str, pair: Pair) -> Estimate | None:
    """Return the mean difference of two arms over all cells of a set that have both."""
    return _mean_gain(gains(rows, group, pair))


def _mean_gain(by_task: Mapping[str, Sequence[Estimate]]) -> Estimate | None:
    differences = [each for of_task in by_task.values() for each in of_task]
    return Estimate.mean_of(differences) if differences else None


def tables(rows: Sequence[Row]) -> list[str]:
    """Return what each factor is worth, how far each arm is below the best, and all accuracies."""
    return [worths(rows), ranking(rows), *(accuracies(rows, group) for group in EPSILONS)]


def worths(rows: Sequence[Row]) -> str:
    """Return what each factor is worth in points, and its least and most by task, on each set."""
    lines = [
        (name, *(_worth_text(rows, group, pair) for group in EPSILONS))
        for name, pair in WORTH.items()
    ]
    return markdown(("points of accuracy, ± 95 % (by task)", "six tasks", "twelve tasks"), lines)


def _worth_text(rows: Sequence[Row], group: str, pair: Pair) -> str:
    by_task = gains(rows, group, pair)
    gain = _mean_gain(by_task)
    if gain is None:
        return "–"
    means = [Estimate.mean_of(of_task).mean for of_task in by_task.values()]
    return f"{gain.mean:+.1f} ± {gain.half():.1f} ({min(means):+.1f} to {max(means):+.1f})"


def ranking(rows: Sequence[Row]) -> str:
    """Return how far below the best mean of a cell each arm is, and in how many it may be the best."""
    whole = {cell: arms for cell, arms in estimates(rows).items() if len(arms) == len(ARMS)}
    losses = estimates(rows, "loss", 1.0)
    sureness = estimates(rows, "overconfidence", 200.0)
    lines = []
    for pair in ARMS:
        if not whole:
            continue
        gaps = {
            cell: max(arms.values(), key=lambda each: each.mean).minus(arms[pair])
            for cell, arms in whole.items()
        }
        among = sum(pair in contenders(arms) for arms in whole.values())
        (_, task, epsilon), most = max(gaps.items(), key=lambda item: item[1].mean)
        loss = Estimate.mean_of([losses[cell][pair] for cell in whole])
        sure = Estimate.mean_of([sureness[cell][pair] for cell in whole])
        lines.append(
            (
                name_of(*pair),
                f"{among} of {len(whole)}",
                str(Estimate.mean_of([*gaps.values()])),
                f"{most.mean:.1f} ({task}, ε = {epsilon:g})",
                f"{loss.mean:.3f}",
                f"{sure.mean - 100.0:+.1f}",
            )
        )
    head = ("arm", "may be the best in", "below the best, mean", "most", "log loss", "too sure by")
    return markdown(head, lines)


def accuracies(rows: Sequence[Row], group: str) -> str:
    """Return the accuracy of every arm on every task of a set."""
    cells = estimates(rows)
    of_group = [row for row in rows if row["set"] == group]
    spent = sorted(EPSILONS[group])
    lines = []
    for (task,) in by(of_group, "task"):
        for pair in ARMS:
            shown = []
            for epsilon in spent:
                arms = cells.get((group, task, epsilon), {})
                value = str(arms[pair]) if pair in arms else "–"
                is_best = pair in arms and pair in contenders(arms)
                shown.append(f"**{value}**" if is_best else value)
            lines.append((task, name_of(*pair), *shown))
    return markdown(("task", "arm", *(f"ε = {epsilon:g}" for epsilon in spent)), lines)


def charts(rows: Sequence[Row]) -> dict[str, go.Figure]:
    """Return accuracy against ε in the mean over tasks, and test error task by task.

    A line is a way of choosing, with Adam where it has both optimizers.
    """
    in_all = plot_lines(
        means_over_tasks(rows),
        x="ε",
        y="test accuracy, %",
        line="way",
        panel="tasks",
        log="x",
        strategies=STRATEGY_OF,
    )
    errors = [
        {**row, "test error, %": str(100.0 - 100.0 * float(row["accuracy"])), "ε": row["epsilon"]}
        for row in rows
        if row["optimizer"] != SGD
    ]
    by_task = plot_lines(
        errors, x="ε", y="test error, %", line="way", panel="task", log="xy", strategies=STRATEGY_OF
    )
    return {"chart": in_all, "tasks": by_task}


def complete_tasks(rows: Sequence[Row], group: str) -> list[str]:
    """Return the tasks of a set that have every arm at every ε of the set."""
    cells = estimates(rows)
    return [
        task
        for (task,) in by([row for row in rows if row["set"] == group], "task")
        if all(len(cells.get((group, task, spent), ())) == len(ARMS) for spent in EPSILONS[group])
    ]


def means_over_tasks(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return by way, ε and repetition the mean accuracy, in percent, over the complete tasks of a set."""
    means = []
    for group in EPSILONS:
        tasks = complete_tasks(rows, group)
        panel = ", ".join(tasks) if len(tasks) < 4 else f"mean of {len(tasks)} tasks"
        drawn = [row for row in rows if row["task"] in tasks and row["optimizer"] != SGD]
        for (epsilon, way, _), repetition in by(drawn, "epsilon", "way", "seed").items():
            accuracy = 100.0 * mean(repetition, "accuracy")
            means.append(
                {"tasks": panel, "ε": epsilon, "way": way, "test accuracy, %": f"{accuracy:.3f}"}
            )
    return means


SHEET = Sheet(
    name="two_factors",
    key=("set", "task", "epsilon", "way", "optimizer"),
    values=(
        "seed",
        *METRICS,
        "gradient_evaluations",
        "epochs",
        "expected_batch_size",
        "spent",
        "claimed",
    ),
    cells=cells,
    fill=fill,
    figures=figures,
    tables=tables,
    charts=charts,
    again=Again(
        {
            "set": "six",
            "task": "table",
            "epsilon": "2.0",
            "way": "public rate",
            "optimizer": SGD,
        },
        "accuracy",
    ),
)

if __name__ == "__main__":
    sys.exit(SHEET.main())
