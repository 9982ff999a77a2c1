"""Estimators for scikit-learn: its own checks, one charge a fit, and what is public is a parameter."""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.exceptions import FitFailedWarning
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

from privtune import Budget, PrivTuneError, load_study, strategies
from privtune.accounting import PoissonSampled, Repeated
from privtune.errors import InvalidInputError
from privtune.ledger import BudgetExceededError, Charge, DatasetMismatchError, Ledger
from privtune.sklearn import PrivateClassifier, PrivateRegressor, PublicFactWarning
from privtune.study import study_names
from tests.test_extras import hide

Made = Callable[..., Any]
FIXED = strategies.Fixed(parameters={"learning_rate": 0.5})
CHECKED = Budget(1e6, 1e-3, name="checked")  # scikit-learn asks for accuracy, and for many fits
FACTS: dict[str, dict[str, Any]] = {
    "classifier": {"classes": "from y"},  # each check has labels of its own
    "regressor": {"target_range": (-4, 4)},
}
FAR = ("check_fit_idempotent", "check_fit_check_is_fitted", "check_n_features_in")
"""Checks with inputs around 100: clipped to other bounds they are all one record, which is refused."""


def checked(kind: str, **facts: Any) -> Any:
    made = {"classifier": PrivateClassifier, "regressor": PrivateRegressor}[kind]
    return made(CHECKED, **{"bounds": (-4, 4), "epsilon": 100.0, **FACTS[kind], **facts})


def named(kind: str) -> list[str]:
    return [
        check.func.__name__ for _, check in estimator_checks_generator(checked(kind), mark=None)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privtune.sklearn.PublicFactWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # its own
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, id=f"{kind}-{place}-{name}")
        for kind in FACTS
        for place, name in enumerate(named(kind))
    ],
)
def test_what_scikit_learn_checks(
    kind: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its checks; none is expected to fail."""
    monkeypatch.chdir(tmp_path)
    estimator = checked(kind)
    (_, check) = list(estimator_checks_generator(estimator, mark=None))[place]
    if check.func.__name__ in FAR:
        estimator.set_params(bounds=(96, 104))
    check(estimator)


BUDGET = Budget(4.0, 1e-5, name="blobs")


@pytest.fixture
def blobs() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(3)
    y = np.repeat([0, 1], 100)
    return rng.normal(y[:, None], 0.3, (200, 2)), y


@pytest.fixture
def make(tmp_path: Path) -> Made:
    def made(budget: Any = BUDGET, **given: Any) -> PrivateClassifier:
        usual = {
            "bounds": (-1, 2),
            "classes": [0, 1],
            "strategy": FIXED,
            "epochs": 2,
            "records": 200,
        }
        return PrivateClassifier(budget, **{**usual, "storage": tmp_path / "p.db", **given})

    return made


def charges(folder: Path, name: str = "blobs") -> list[Charge]:
    with Ledger(folder / "p.db") as ledger:
        return list(ledger.charges(name))


def test_each_fit_is_charged_once_and_refused_where_it_does_not_fit(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    model = make(epsilon=3.5).fit(*blobs)
    (charge,) = charges(tmp_path)
    assert (charge.state, charge.study, charge.arm) == ("settled", model.study_, "fit")
    assert 3.4 < model.guarantee_.epsilon <= 3.5
    before = model.predict_proba(blobs[0])
    with pytest.raises(BudgetExceededError, match=r"'blobs'.*has no room for this charge"):
        model.fit(*blobs)
    assert len(charges(tmp_path)) == 1
    assert study_names(tmp_path / "p.db") == [model.study_], "a refused fit leaves no study"
    assert (model.predict_proba(blobs[0]) == before).all()
    model.set_params(epsilon=0.3).fit(*blobs)
    assert len(charges(tmp_path)) == 2
    with pytest.raises(PrivTuneError, match="exists with epsilon = 4"):
        make(Budget(5.0, 1e-5, name="blobs")).fit(*blobs)


@pytest.mark.parametrize("given", [(4.0, 1e-5), [4.0, 1e-5], 4.0, "iris", None])
def test_two_numbers_name_no_dataset(make: Made, blobs: Any, tmp_path: Path, given: Any) -> None:
    """Every dataset has a budget of its own, so a budget without a name is none."""
    with pytest.raises(InvalidInputError, match=r"privtune\.Budget\(4\.0, 1e-05, name="):
        make(given).fit(*blobs)
    assert not (tmp_path / "p.db").exists()


def test_frames_of_other_columns_are_another_dataset(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = blobs
    make(epsilon=1.0).fit(pandas.DataFrame(x, columns=["age", "height"]), y)
    make(epsilon=0.5).fit(pandas.DataFrame(x, columns=["age", "weight"]), y)
    with pytest.raises(DatasetMismatchError, match="columns pixel, colour"):
        make(epsilon=0.5).fit(pandas.DataFrame(x, columns=["pixel", "colour"]), y)
    assert len(charges(tmp_path)) == 2
    assert len(study_names(tmp_path / "p.db")) == 2, "a refused fit leaves no study"


def reached(start: object) -> Iterator[object]:
    """Yield what an object holds, directly or not, but for modules and classes."""
    seen, left = dict[int, object](), [start]
    while left:
        part = left.pop()
        of_module = isinstance(part, dict) and "__builtins__" in part
        if id(part) in seen or of_module or isinstance(part, type | ModuleType):
            continue
        seen[id(part)] = part
        yield part
        left += gc.get_referents(part)


def halved(x: Any) -> Any:
    return x / 2


def test_the_end_of_a_pipeline_is_cloned_and_pickled(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    x, y = blobs
    steps = [("half", FunctionTransformer(halved)), ("model", make(random_state=0))]
    fitted = Pipeline(steps).fit(x, y)
    model = fitted.named_steps["model"]
    assert len(charges(tmp_path)) == 1
    assert fitted.score(x, y) > 0.7
    assert not hasattr(clone(fitted).named_steps["model"], "model_")
    assert clone(fitted).get_params()["model__budget"] == BUDGET
    assert clone(fitted).set_params(model__epochs=3).named_steps["model"].epochs == 3
    assert not [part for part in reached(fitted) if len(x) in getattr(part, "shape", ())]
    packed = pickle.dumps(fitted)
    for row in (x.tobytes(), (x / 2).tobytes(), torch.tensor(x / 2).float().numpy().tobytes()):
        assert row[:64] not in packed
    again = pickle.loads(packed)
    assert (again.predict_proba(x) == fitted.predict_proba(x)).all()
    assert again.named_steps["model"].guarantee_ == model.guarantee_
    with pytest.raises(PrivTuneError, match="ask its estimator"):
        model.release_.predict(x)
    released = model.release_.state_dict()
    assert all(torch.equal(released[n], v) for n, v in model.release_.model.state_dict().items())
    assert len(charges(tmp_path)) == 1


def test_a_search_of_scikit_learn_s_charges_each_of_its_fits(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    x, y = blobs
    large, small = (Budget(e, 1e-5, name=f"of-{e:g}") for e in (6.0, 2.0))
    GridSearchCV(make(large, epsilon=1.0), {"epochs": [1, 2]}, cv=2).fit(x, y)
    assert len(charges(tmp_path, "of-6")) == 2 * 2 + 1
    given = {"param_grid": {"epochs": [1, 2]}, "cv": 2, "error_score": -1.0}
    search = GridSearchCV(make(small, epsilon=1.0), refit=False, **given)
    with pytest.warns(FitFailedWarning, match="BudgetExceededError"):
        search.fit(x, y)
    trained = sum((search.cv_results_[f"split{fold}_test_score"] >= 0).sum() for fold in (0, 1))
    assert 0 < trained == len(charges(tmp_path, "of-2")) < 4
    assert len(study_names(tmp_path / "p.db")) == 5 + trained


def test_a_strategy_charges_its_whole_search_once(make: Made, blobs: Any, tmp_path: Path) -> None:
    selection = strategies.PapernotSteinke(mean_runs=2)
    model = make(strategy=selection, validation=0.3, records=200).fit(*blobs)
    (charge,) = charges(tmp_path)
    assert model.release_.sealed
    assert set(model.release_.params) == {"learning_rate"}
    with closing(load_study(model.study_, storage=tmp_path / "p.db")) as study:
        (plan,) = study.plans
    assert plan.score is not None
    assert plan.training.schedule.records == 140
    assert charge.event == plan.event


def test_a_share_of_the_records_calibrates_probabilities(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    """Charged with the fit, on records that are not trained on; predicted classes are the logits' own."""
    x, y = blobs
    model = make(test=0.4, records=200, random_state=1).fit(x, y)
    (charge,) = charges(tmp_path)
    with closing(load_study(model.study_, storage=tmp_path / "p.db")) as study:
        (plan,) = study.plans
    assert charge.event == plan.event
    assert plan.training.schedule.records == 120
    assert plan.report is not None
    assert plan.report.records == 80
    temperature = model.release_.temperature
    assert temperature is not None
    with torch.no_grad():
        logits = model.model_(torch.from_numpy(model._scaled(np.asarray(x, np.float64))))
    np.testing.assert_allclose(model.predict_proba(x), (logits / temperature).softmax(dim=1))
    assert model.predict(x).tolist() == model.classes_[logits.argmax(dim=1)].tolist()
    assert pickle.loads(pickle.dumps(model)).release_.temperature == temperature


def test_what_is_outside_of_the_public_facts_is_clipped_or_adds_nothing(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    x, y = blobs[0].copy(), blobs[1]
    budget = Budget(1000.0, 1e-5, name="many")

    def weights(x: Any, y: Any, made: Any = None, **given: Any) -> npt.NDArray[Any]:
        model = made or make(budget, **{"epsilon": 2.0, "random_state": 1, **given})
        return model.fit(x, y).release_.weights.numpy().copy()

    usual = weights(x, y)
    assert not np.array_equal(usual, weights(x, y, random_state=2))
    x[0, 0], x[1, 1], x[2, 0] = 7.0, -np.inf, np.nan
    clipped = x.copy()
    clipped[0, 0], clipped[1, 1], clipped[2, 0] = 2.0, -1.0, 0.5
    assert np.array_equal(weights(x, y), weights(clipped, y))
    strange, gone = y.astype(float), x.copy()
    strange[:5], gone[:5] = [7, np.nan, -1, 0.5, np.inf], 0.123
    assert np.array_equal(weights(x, strange), weights(gone, strange))
    low, high = np.full(2, -1.0), np.full(2, 2.0)
    assert np.array_equal(weights(x, y), weights(x, y, bounds=(low, high)))
    assert np.array_equal(
        weights(x, np.array(["a", "b"])[y], classes=["b", "a"]),
        weights(x, y),
    )
    with pytest.warns(PublicFactWarning, match="no guarantee protects it"):
        assert np.array_equal(weights(x, y, classes="from y"), weights(x, y))

    def number(range_: tuple[float, float] = (0.0, 1.0)) -> PrivateRegressor:
        at = {
            "storage": tmp_path / "p.db",
            "random_state": 1,
            "epochs": 2,
            "epsilon": 2.0,
            "records": 200,
        }
        return PrivateRegressor(budget, bounds=(-1, 2), target_range=range_, **at)

    far = np.where(y == 1, 9.0, -9.0)
    assert np.array_equal(weights(x, far, number()), weights(x, y, number()))
    far[:2], gone = np.nan, x.copy()
    gone[:2] = 0.123
    assert np.array_equal(weights(x, far, number()), weights(gone, far, number()))
    assert np.array_equal(weights(x, 10 * y + 5, number((5.0, 15.0))), weights(x, y, number()))


def test_the_number_of_records_counts_as_public_where_it_is_read(make: Made, blobs: Any) -> None:
    with pytest.warns(
        PublicFactWarning, match="the number of records, 200, sets the sampling rate"
    ):
        make(records=None).fit(*blobs)


@pytest.mark.filterwarnings("ignore::privtune.sklearn.PublicFactWarning")
def test_the_number_of_records_sets_the_sampling_rate(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    budget = Budget(20.0, 1e-5, name="rates")
    for records, batch, rate in ((None, None, 12 / 200), (250, None, 15 / 250), (250, 50, 0.2)):
        make(budget, epsilon=2.0, records=records, expected_batch_size=batch).fit(*blobs)
        event = charges(tmp_path, "rates")[-1].event
        assert isinstance(event, Repeated)
        assert isinstance(event.event, PoissonSampled)
        assert event.event.rate == rate


WRONG: dict[str, dict[str, Any]] = {
    "bounds": {"bounds": (2, -1)},
    "bounds of other features": {"bounds": ([0, 0, 0], [1, 1, 1])},
    "no bounds": {"bounds": None},
    "endless bounds": {"bounds": (-np.inf, 1)},
    "one class": {"classes": [1]},
    "a word": {"classes": "all"},
    "budget": {"budget": 4.0},
    "hidden": {"hidden": (0,)},
    "records": {"records": 0},
    "validation": {"validation": 1.0, "strategy": strategies.PapernotSteinke(mean_runs=2)},
    "test": {"test": 1.0},
    "less than no test": {"test": -0.1},
    "method": {"strategy": strategies.InRun(arm="a", method="magic")},
    "strategy": {"strategy": "auto"},
    "epochs": {"epochs": -1},
    "batch": {"expected_batch_size": 0},
    "password": {"storage": "postgresql+psycopg://ann:hunter2@127.0.0.1/p"},
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_parameter_is_refused_before_anything_is_charged(
    wrong: str, make: Made, blobs: Any, tmp_path: Path
) -> None:
    with pytest.raises(PrivTuneError) as caught:
        make(**WRONG[wrong]).fit(*blobs)
    assert len(str(caught.value)) < 400
    assert "hunter2" not in str(caught.value)
    assert study_names(tmp_path / "p.db") == []


def test_what_is_not_supported_is_refused(make: Made, blobs: Any, tmp_path: Path) -> None:
    x, y = blobs
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        make().fit(csr_array(x), y)
    with pytest.raises(ValueError, match="1d array"):
        make().fit(x, np.stack([y, y], axis=1))
    with pytest.raises(TypeError, match="sample_weight"):
        make().fit(x, y, sample_weight=np.ones(200))
    texts, number = np.where(x > 0.5, "alice", "1").astype(object), make().get_params()
    for name in ("classes", "strategy", "class_weight", "test"):
        del number[name]
    for refused in (
        lambda: make().fit(texts, y),
        lambda: PrivateRegressor(**number, target_range=(0, 1)).fit(x, texts[:, 0]),
    ):
        with pytest.raises(InvalidInputError, match="must be numbers") as shown:
            refused()
        assert "alice" not in f"{shown.value} {shown.value.__cause__}"
    with pytest.raises(TypeError, match="classes"):
        PrivateClassifier(BUDGET, bounds=(0, 1))  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="one class alone"):
        make(classes=range(1)).fit(x, y)
    assert study_names(tmp_path / "p.db") == []


@pytest.mark.parametrize(
    ("classes", "change", "said"),
    [
        ([0, 1], lambda y: y + 7, "List every label as y has it"),
        ([0, 1], lambda y: y.astype(str), r"another type: .* classes=\['0', '1'\], or convert y"),
        (["0", "1"], lambda y: y, "another type"),
        ([0, 1], lambda y: y.astype(str).astype(object), "another type"),
        (["yes", "no"], lambda y: np.where(y > 0, "Yes", "No"), "List every label as y has it"),
        ([0, 1], np.zeros_like, "have one class.*Nothing was charged"),
        ([0, 1], lambda y: y[:30], "less than a fifth"),
    ],
)
def test_records_that_do_not_fit_are_refused_with_what_an_estimator_can_change(
    make: Made, blobs: Any, tmp_path: Path, classes: Any, change: Any, said: str
) -> None:
    x, y = blobs
    labels = change(y)
    with pytest.raises(InvalidInputError, match=said) as refused:
        make(classes=classes).fit(x[: len(labels)], labels)
    assert "--" not in str(refused.value), "no flag of a command line"
    assert "force" not in str(refused.value)
    assert study_names(tmp_path / "p.db") == []


@pytest.mark.parametrize("kind", [str, np.str_, object, float, bool])
def test_labels_are_what_they_are_declared_as(make: Made, blobs: Any, kind: Any) -> None:
    x, y = blobs
    labels = y.astype(str).astype(object) if kind is object else y.astype(kind)
    model = make(classes=list(dict.fromkeys(labels.tolist()))).fit(x, labels)
    assert model.score(x, labels) > 0.8


@pytest.mark.parametrize("records", [200, 240])
@pytest.mark.parametrize("folds", [2, 3])
def test_folds_of_half_the_declared_records_are_trained_on(
    make: Made, blobs: Any, tmp_path: Path, records: int, folds: int
) -> None:
    x, y = blobs
    search = RandomizedSearchCV(
        make(Budget(40.0, 1e-5, name="folds"), epsilon=2.0, records=records),
        {"epochs": [1, 2]},
        n_iter=2,
        cv=folds,
        random_state=0,
    )
    search.fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert len(charges(tmp_path, "folds")) == 2 * folds + 1


def test_a_search_without_budget_ends_without_a_winner(make: Made, blobs: Any) -> None:
    x, y = blobs
    poor = make(Budget(2.0, 1e-5, name="poor"), epsilon=1.0)
    search = RandomizedSearchCV(poor, {"epochs": [1, 2]}, n_iter=2, cv=2, random_state=0)
    with (
        pytest.warns((FitFailedWarning, UserWarning)),
        pytest.raises(BudgetExceededError),
    ):
        search.fit(x, y)


def test_a_delta_that_is_too_large_is_answered_with_another_budget(
    make: Made, blobs: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidInputError, match=r"above 1 / \(number of .* budget under another name"
    ) as refused:
        make(Budget(4.0, 0.01, name="blobs")).fit(*blobs)
    assert "force" not in str(refused.value)
    assert study_names(tmp_path / "p.db") == []


def test_without_scikit_learn_one_sentence_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, "sklearn")
    monkeypatch.delitem(sys.modules, "privtune.sklearn")
    with pytest.raises(PrivTuneError, match=r"needs sklearn.*pip install 'privtune\[demo\]'"):
        importlib.import_module("privtune.sklearn")


@pytest.mark.parametrize("strategy", [None, strategies.PapernotSteinke(mean_runs=2)])
def test_a_fit_may_measure_its_model_on_records_that_it_keeps_apart(
    make: Made, blobs: Any, tmp_path: Path, strategy: Any
) -> None:
    """Whatever the strategy, within the ε of the fit; and the kept records are not trained on."""
    x, y = blobs
    model = make(strategy=strategy, test=0.25, random_state=1).fit(x, y)
    score = model.release_.estimates["test_accuracy"]
    assert 0.0 < score.low <= score.value <= score.high
    assert score.width < 0.5
    assert model.guarantee_.epsilon <= 4.0
    with closing(load_study(model.study_, storage=tmp_path / "p.db")) as study:
        (plan,) = study.plans
    assert plan.training.schedule.records == (150 if strategy is None else 110)
    with pytest.raises(InvalidInputError, match=r"test = 1.5"):
        make(test=1.5).fit(x, y)
    searching = make(strategy=strategies.PapernotSteinke(mean_runs=2), test=0.9)
    with pytest.raises(InvalidInputError, match=r"test = 0.9.*validation"):
        searching.fit(x, y)


def linear_parts(model: PrivateClassifier, x: Any) -> Any:
    return x @ model.coef_.T + model.intercept_


@pytest.mark.parametrize("labels", [["no", "yes"], ["a", "b", "c"]])
def test_a_linear_classifier_has_scikit_learn_s_coefficients(
    make: Made, blobs: Any, labels: list[str]
) -> None:
    from sklearn.linear_model import LogisticRegression

    x = np.clip(blobs[0], -1, 2)
    y = np.array(labels)[np.arange(len(x)) % len(labels)]
    model = make(classes=labels, bounds=([-1, -2], [2, 3])).fit(x, y)
    theirs = LogisticRegression().fit(x, y)
    for name in ("coef_", "intercept_"):
        assert getattr(model, name).shape == getattr(theirs, name).shape
    scores = model.decision_function(x)
    assert scores.shape == theirs.decision_function(x).shape
    assert scores == pytest.approx(np.squeeze(linear_parts(model, x)))
    places = (scores > 0).astype(int) if len(labels) == 2 else scores.argmax(axis=1)
    assert (np.array(labels)[places] == model.predict(x)).all()
    ratios = np.log(model.predict_proba(x))
    assert ratios[:, 1] - ratios[:, 0] == pytest.approx(
        scores if len(labels) == 2 else scores[:, 1] - scores[:, 0]
    )


def test_a_linear_regression_has_coefficients_in_the_units_that_were_given(tmp_path: Path) -> None:
    x = np.linspace(2, 4, 300)[:, None]
    y = 10 + 3 * x[:, 0]
    model = PrivateRegressor(
        Budget(8.0, 1e-5, name="line"),
        bounds=(2, 4),
        target_range=(10, 25),
        records=300,
        storage=tmp_path / "p.db",
    ).fit(x, y)
    assert model.coef_.shape == (1,)
    predictions = model.predict(x)
    inside = (predictions > 10) & (predictions < 25)
    assert inside.mean() > 0.5
    assert (x @ model.coef_ + model.intercept_)[inside] == pytest.approx(predictions[inside])


def test_a_network_has_no_coefficients(make: Made, blobs: Any) -> None:
    model = make(hidden=(3,))
    assert not hasattr(model, "coef_"), "it is not fitted"
    model.fit(*blobs)
    assert not hasattr(model, "coef_")
    with pytest.raises(AttributeError, match="intercept_ is of linear models"):
        model.intercept_  # noqa: B018
    assert model.decision_function(blobs[0]).shape == (200,)


def test_class_weights_move_the_decision_and_not_the_charge(make: Made, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(1000) < 0.1).astype(int)
    x = rng.normal(y[:, None], 1.0, (1000, 2))
    given = {"records": 1000, "bounds": (-4, 4), "epochs": 10, "epsilon": 2.0, "random_state": 1}
    share = {}
    for name, weights in (("none", None), ("one", {1: 9}), ("all", {0: 2, 1: 18})):
        strategy = strategies.Fixed(parameters={"learning_rate": 1.0})
        model = make(Budget(9.0, 1e-5, name="w"), strategy=strategy, class_weight=weights, **given)
        share[name] = model.fit(x, y).predict(x).mean()
    assert share["none"] < 0.1 < share["one"]
    assert share["all"] == share["one"], "the ratio of the weights is what counts"
    first, *others = charges(tmp_path, "w")
    for other in others:
        assert other.event == first.event


@pytest.mark.parametrize(
    ("weights", "strategy", "says"),
    [
        ("balanced", FIXED, "counts of private records"),
        ("even", FIXED, "must list a public weight"),
        ([1, 2], FIXED, "must map classes to weights"),
        ({0: 1, 2: 3}, FIXED, r"\[2\]: must be classes, which are 0, 1"),
        ({0: 0.0}, FIXED, "above 0"),
        ({0: -1}, FIXED, "above 0"),
        ({0: float("inf")}, FIXED, "finite"),
        ({1: 9}, strategies.InRun(arm="fit", method="hyfreedp"), "equally long, as hyfreedp does"),
        (
            {1: 9},
            strategies.InRun(arm="fit", method="public-rate"),
            "equally long, as public-rate does",
        ),
        ({1: 9}, strategies.Auto(arm="fit"), "that auto may choose"),
    ],
)
def test_class_weights_that_cannot_be_had_cost_nothing(
    make: Made, blobs: Any, tmp_path: Path, weights: Any, strategy: Any, says: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"class_weight = .*{says}") as caught:
        make(class_weight=weights, strategy=strategy).fit(*blobs)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "p.db").exists()


def test_class_weights_train_by_a_method_that_clips_unless_told(make: Made, blobs: Any) -> None:
    plain = make(strategy=None).fit(*blobs)
    assert plain.release_.strategy == "hyfreedp"
    weighted = make(Budget(4.0, 1e-5, name="w"), strategy=None, class_weight={1: 2}).fit(*blobs)
    assert weighted.release_.strategy == "fixed"


def test_epochs_and_batch_may_be_chosen(make: Made, blobs: Any, tmp_path: Path) -> None:
    model = make(epochs="auto", compute=3_000).fit(*blobs)
    with closing(load_study(model.study_, storage=model.storage)) as study:
        plan = study.plans[0]
    schedule = plan.training.schedule
    assert 1_500 < schedule.expected_gradient_evaluations <= 3_000
    assert plan.details["schedule"]["expected_batch_size"] == round(schedule.expected_batch_size)
    given = make(Budget(4.0, 1e-5, name="b"), epochs="auto", expected_batch_size=20, compute=3_000)
    with closing(load_study(given.fit(*blobs).study_, storage=given.storage)) as study:
        assert round(study.plans[0].training.schedule.expected_batch_size) == 20
