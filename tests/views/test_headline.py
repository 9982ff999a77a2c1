"""The sentence that a study ends in says what its numbers show, and no more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privtune
from privtune.strategies import Repetition
from privtune.study import ArmStatus
from privtune.training.mechanism.constant import constant_answer, declared_constant
from privtune.training.mechanism.estimates import ScoreEstimate
from privtune.views.headline import constant_notes, headline
from privtune.views.order import show_probability
from tests.tracked import Tracked

ACCURACY, LOSS = "test_accuracy", "test_loss"


def score(
    low: float, high: float, *, constant: float | None = None, value: float | None = None
) -> ScoreEstimate:
    middle = (low + high) / 2 if value is None else value
    return ScoreEstimate(middle, low, high, 0.0, 1.0, ("the noise",), share=True, constant=constant)


def statuses(
    tracked: Tracked, scores: Sequence[ScoreEstimate | None], *, metric: str = ACCURACY
) -> list[ArmStatus]:
    """Return the arms of the study with other scores; without one where it is None."""
    read = tracked.study.status()
    return [
        replace(
            arm, release=replace(arm.release, choice={}, estimates={metric: found} if found else {})
        )
        for arm, found in zip(read, scores, strict=True)
        if arm.release is not None
    ]


def repeated(
    tracked: Tracked,
    rows: Sequence[Sequence[float]],
    *,
    metric: str = ACCURACY,
    constant: float | None = None,
) -> list[ArmStatus]:
    """Return the arms of the study with repetitions, a row of values an arm."""
    read = tracked.study.status()[: len(rows)]
    changed = []
    for arm, values in zip(read, rows, strict=True):
        assert arm.release is not None
        runs = tuple(
            Repetition(
                params={},
                score=None,
                estimates={metric: score(0.1, 0.9, value=v, constant=constant)},
            )
            for v in values
        )
        release = replace(
            arm.release, choice={}, estimates=dict(runs[0].estimates), repetitions=runs
        )
        changed.append(replace(arm, release=release))
    return changed


def test_the_best_of_intervals_that_are_apart(tracked: Tracked) -> None:
    arms = statuses(tracked, [score(0.5, 0.6), score(0.85, 0.89), score(0.7, 0.8)])
    found = headline(tracked.study, arms)
    assert (
        found.answer
        == "`selection` is best: 87.0% [85.0, 89.0], above the intervals of all other arms."
    )
    assert "selection" in found.use


def test_intervals_that_overlap_show_no_best(tracked: Tracked) -> None:
    arms = statuses(tracked, [score(0.5, 0.6), score(0.85, 0.89), score(0.8, 0.86)])
    found = headline(tracked.study, arms)
    best = "No arm is shown to be best: `selection` has 87.0% [85.0, 89.0]"
    assert found.answer == f"{best}, and the interval of `hyfree` overlaps with it."
    assert "repeats: 5" in found.advice
    assert found.lines[0] == f"{found.answer} {found.advice}"
    use = headline(tracked.study, arms).use
    assert use.startswith("Use selection, as no other is shown to be better; in Python: ")
    assert ".release('selection')" in use


def test_of_equal_arms_the_cheaper_one_is_advised(tracked: Tracked) -> None:
    arms = statuses(tracked, [None, score(0.85, 0.89), score(0.85, 0.89)])
    found = headline(tracked.study, arms)
    assert arms[1].plan.expected_gradient_evaluations > arms[2].plan.expected_gradient_evaluations
    assert "`hyfree` has 87.0%" in found.answer
    assert ".release('hyfree')" in found.use


@pytest.mark.parametrize(
    ("holds", "charged", "open_", "says"),
    [
        (False, True, False, r"Budget toy, with [\d.]+ of ε left, does not hold a new study of repeats: 5, "
         r"which would tell more: with the noise of this one it costs ε = [\d.]+\.$"),
        (True, True, False, r"A new study of repeats: 5 tells more: with the noise of this one it costs "
         r"ε = [\d.]+, which budget toy holds\.$"),
        (True, True, True, r"A new study of repeats=5 tells more: "),
        (False, False, False, r"A new study of repeats: 5 tells more, and with a new budget it takes ε from "
         r"nobody, since all records are public\.$"),
    ],
)  # fmt: skip
def test_repetitions_are_advised_as_they_can_be_had(
    tracked: Tracked,
    monkeypatch: pytest.MonkeyPatch,
    holds: bool,
    charged: bool,
    open_: bool,
    says: str,
) -> None:
    study = tracked.study
    monkeypatch.setattr(study._life.ledger, "holds", lambda budget, events: holds)
    spec = study.spec.model_copy(update={"task": None} if open_ else {})
    plans = tuple(replace(plan, repeats_charged=charged) for plan in study.plans)
    with monkeypatch.context() as patch:
        patch.setattr(type(study), "spec", property(lambda _: spec), raising=False)
        patch.setattr(type(study), "plans", property(lambda _: plans))
        arms = statuses(tracked, [score(0.5, 0.6), score(0.85, 0.89), score(0.8, 0.86)])
        answer = headline(study, arms).advice
    assert re.search(says, answer), answer


def test_one_arm_is_no_remainder(tracked: Tracked) -> None:
    first, second, third = statuses(tracked, [score(0.5, 0.6), None, None])
    assert (
        headline(tracked.study, [first]).answer
        == "`defaults`, the only arm, reaches 55.0% [50.0, 60.0]."
    )
    waiting = [replace(arm, release=None) for arm in (second, third)]
    assert (
        headline(tracked.study, [first, *waiting]).answer
        == "Only `defaults` is released so far: it reaches 55.0% [50.0, 60.0]."
    )
    assert (
        headline(tracked.study, [first, second, third]).answer
        == "Only `defaults` was measured: it reaches 55.0% [50.0, 60.0]."
    )


def test_less_of_a_loss_is_better(tracked: Tracked) -> None:
    arms = statuses(tracked, [score(0.1, 0.2), score(0.3, 0.4), score(0.5, 0.6)], metric=LOSS)
    assert headline(tracked.study, arms).answer.startswith(
        "`defaults` is best: 15.0% [10.0, 20.0], below"
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[0.8, 0.81, 0.82, 0.8], [0.9, 0.91, 0.93, 0.9]], "`selection` is best: 91.00% ± 0.71%, better than "
         "`defaults` in 4 of 4 repetitions."),
        ([[0.8, 0.95, 0.7, 0.9], [0.9, 0.85, 0.93, 0.8]], "No arm is shown to be best: the best mean "
         "is that of `selection`, 87.00% ± 2.86%, and it is less than 95% sure to be better than that of "
         "`defaults` (64%)."),  # scipy.stats.ttest_rel: 0.642
        ([[0.5, 0.52, 0.51, 0.5], [0.8, 0.95, 0.7, 0.9], [0.9, 0.85, 0.93, 0.8]], "No arm is shown to be "
         "best: the best mean is that of `hyfree`, 87.00% ± 2.86%, and it is less than 95% sure to be "
         "better than that of `selection` (64%); `defaults` is shown to be worse."),  # of `defaults` 0.9995
    ],
)  # fmt: skip
def test_repetitions_are_compared_in_pairs(
    tracked: Tracked, rows: list[list[float]], says: str
) -> None:
    assert headline(tracked.study, repeated(tracked, rows)).answer == says


def test_no_arm_has_learnt_anything(tracked: Tracked) -> None:
    arms = statuses(tracked, [score(0.6, 0.7, constant=0.63), score(0.5, 0.6, constant=0.63), None])
    found = headline(tracked.study, arms)
    says = (
        "By test accuracy no arm is shown to be better than always giving the same answer (63.0%)."
    )
    assert found.answer == says
    assert found.use == ""
    assert [note.partition(":")[0] for note in constant_notes(arms)] == ["defaults", "selection"]


def test_one_arm_has_learnt_nothing(tracked: Tracked) -> None:
    arms = statuses(
        tracked, [score(0.9, 0.95, constant=0.63), score(0.5, 0.64, constant=0.63), None]
    )
    assert headline(tracked.study, arms).answer.startswith("`defaults` is best")
    [note] = constant_notes(arms)
    assert note == "selection: not shown to be better than always giving the same answer (63.0%)."


@pytest.mark.parametrize(
    ("values", "learnt"), [([0.63, 0.64, 0.62], False), ([0.65, 0.651, 0.652], True)]
)
def test_a_mean_is_held_against_its_error(
    tracked: Tracked, values: list[float], learnt: bool
) -> None:
    arms = repeated(tracked, [values], constant=0.63)
    assert (constant_notes(arms) == []) == learnt


def test_arms_that_were_not_measured(tracked: Tracked) -> None:
    assert headline(tracked.study, statuses(tracked, [None, None, None])).answer == (
        "No arm was measured, so it is unknown which one is best."
    )
    nothing = [replace(arm, release=None) for arm in tracked.study.status()]
    assert headline(tracked.study, nothing, option=" --storage x.db").answer == (
        "Nothing is released yet: privtune study run toy --storage x.db"
    )


def test_every_page_has_the_answer(tracked: Tracked) -> None:
    from privtune.views.comparison import comparison_document, to_markdown
    from privtune.views.record import budget_view, study_note
    from privtune.views.report import render_study

    study = tracked.study
    arms = study.status()
    answer = headline(study, arms).answer
    assert comparison_document(study)["headline"]["answer"] == answer
    assert to_markdown(study).startswith(answer)
    # MLflow shows two lines of a note: the answer, and how to use it.
    note = study_note(study, budget_view(study), arms).split("\n")
    assert (note[0], note[1]) == (answer, headline(study, arms).use)
    assert answer.split("`")[0] in render_study(study)


@pytest.mark.parametrize("rarest", [0.1, 0.3, 0.5])
def test_constant_answers_are_those_of_the_best_constant(rarest: float) -> None:
    """Held against every constant answer, scored by its definition."""
    rng = np.random.default_rng(1)
    y = (rng.random(2000) < rarest).astype(float)
    accuracy = max(float((y == answer).mean()) for answer in (0.0, 1.0))
    found = constant_answer("accuracy", np.append(y, -1.0), of_classes=True)
    assert found is not None
    assert found.value == pytest.approx(accuracy)
    assert declared_constant("accuracy", classes=2, rarest=rarest) == pytest.approx(1 - rarest)
    assert declared_constant("accuracy", classes=3, rarest=rarest) is None
    numbers = rng.normal(3.0, 2.0, 500)
    grid = np.linspace(numbers.min(), numbers.max(), 4001)
    for metric, loss in (("mae", np.abs), ("mse", np.square)):
        best = min(float(loss(numbers - answer).mean()) for answer in grid)
        answer = constant_answer(metric, np.append(numbers, np.nan), of_classes=False)
        assert answer is not None
        assert answer.value == pytest.approx(best, rel=1e-3)


def test_the_model_of_a_program_is_asked_in_that_program(tmp_path: Path) -> None:
    study = tried(tmp_path)
    use = headline(study, study.status()).use
    assert "run the program again, with create_study(..., load_if_exists=True)" in use
    assert "load_study" not in use
    again = tried(tmp_path)
    assert again.spent() == study.spent()
    assert again.release("fixed").predict(torch.zeros(1, 2))["prediction"].notna().all()
    empty = privtune.create_study("empty", budget=BUDGET, storage=tmp_path / "p.db")
    said = headline(empty, empty.status()).answer
    assert said == "Nothing is released yet: run its program"


def test_the_model_of_a_fit_is_asked_of_its_estimator(tmp_path: Path) -> None:
    from privtune.sklearn import PrivateClassifier

    x = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    storage = str(tmp_path / "p.db")
    model = PrivateClassifier(
        budget=BUDGET, storage=storage, records=200, bounds=(-1, 1), classes=[0, 1], epochs=1
    )
    model.fit(x, (x[:, 0] > 0).astype(int))
    study = privtune.load_study(model.study_, storage=storage)
    assert "of the estimator that was fitted" in headline(study, study.status()).use


def tried(folder: Path) -> privtune.Study:
    """Run a program of a user's own, again where it has run."""
    study = privtune.create_study(
        "own", budget=BUDGET, storage=folder / "p.db", load_if_exists=True
    )
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    study.optimize(
        privtune.make_task(
            build, loss=loss, data=(x, (x[:, 0] > 0).long()), split={"train": 150, "validation": 50}
        ),
        strategy=privtune.strategies.Fixed(parameters={"rate": 2.0}),
        epochs=1,
        expected_batch_size=75,
    )
    return study


BUDGET = privtune.Budget(8.0, 1e-5, name="own")


def build(trial: Any) -> privtune.Candidate:
    model = torch.nn.Linear(2, 2)
    rate = trial.suggest_float("rate", 0.1, 9)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=rate))


def loss(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def test_a_doubt_is_never_rounded_away() -> None:
    """A table that says 95% beside an answer that calls it not shown contradicts it."""
    probabilities = (0.9499, 0.95, 0.9949, 0.009, None)
    shown = [show_probability(probability) for probability in probabilities]
    assert shown == ["94%", "95%", ">99%", "<1%", "not known"]
