"""study.optimize: a build declares candidates, the engine trains them; refusals come before the charge."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger
from privtune.spaces import LogNormal
from privtune.strategies import (
    Auto,
    Everything,
    Fixed,
    LinearScaling,
    LiuTalwar,
    PapernotSteinke,
)
from privtune.strategies import SubsampledTuning as Subsampled
from privtune.study import (
    DependentTrialsError,
    SealedError,
    Study,
    StudyInterruptedError,
)
from privtune.study.failures import ArmStoppedError
from privtune.study.trial import Trial
from privtune.training.mechanism.streams import Streams
from tests.study.conftest import PARAMETERS, toy_spec
from tests.study.elsewhere import (
    OWN,
    PATHS,
    TERMS,
    TRAIN,
    VALIDATION,
    conditional,
    linear,
    optimize_own,
    plain,
)
from tests.toy import blobs

Build = Callable[[privtune.Trial], Any]


def make(storage: str, name: str = "loop", **options: Any) -> Study:
    budget = privtune.Budget(6.0, 1e-5, name="loop")
    return privtune.create_study(name, budget=budget, storage=storage, **options)


def charges(storage: str) -> int:
    with Ledger(storage) as ledger:
        return len(ledger.charges("loop"))


def started(begun: list[bool]) -> Any:
    """Return an observer that notes when an arm begins, after its rehearsal and its charge."""
    return types.SimpleNamespace(
        arm_started=lambda plan: begun.append(True),
        arm_failed=lambda plan: None,
        released=lambda plan, release: None,
        step=lambda *_: None,
        rehearsed=lambda *_: None,
    )


def candidate(model: nn.Module, rate: float = 0.5, **options: Any) -> privtune.Candidate:
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate), **options)


def test_a_conditional_space_is_searched_and_the_best_alone_released(storage: str) -> None:
    study = make(storage, seed=3)
    heard: list[Any] = []
    release = study.optimize(
        privtune.make_task(conditional, **OWN),
        strategy=PapernotSteinke(mean_runs=4),
        callbacks=[lambda s, r: heard.append((s.name, r.arm))],
        **TERMS,
    )
    assert release.guarantee.epsilon <= 6.0
    assert ("width" in release.params) == release.params["deep"]
    assert release.score is not None
    assert release.trials == ()
    assert heard == [("loop", "papernot-steinke")]
    declared = study.plans[0].public_facts
    assert declared["training records"].startswith("240")
    assert study.export()["certificate"]["entries"][1]["body"]["public"] == declared
    assert sum(t.numel() for t in release.state_dict().values()) == release.weights.numel()
    with torch.no_grad():
        right = release.model(VALIDATION[0]).argmax(dim=1) == VALIDATION[1]
    assert float(right.double().mean()) > 0.5
    frame = study.compare()
    assert list(frame.index) == ["papernot-steinke"]
    assert frame.loc["papernot-steinke", "state"] == "settled"
    again = study.optimize(
        privtune.make_task(conditional, **OWN),
        strategy=PapernotSteinke(mean_runs=4),
        epsilon=6.0,
        **TERMS,
    )
    assert torch.equal(again.weights, release.weights)
    assert not study.finished, "another arm may come"
    assert charges(storage) == 1


def blob_model(trial: privtune.Trial) -> privtune.Candidate:
    """Build the model of tests.toy:blobs, for the arm's method to step."""
    trial.suggest_float("learning_rate", 0.05, 5.0)
    trial.suggest_float("max_grad_norm", 0.05, 5.0)
    return privtune.Candidate(blobs().model())


@pytest.mark.parametrize(
    ("strategy", "options", "task", "build"),
    [
        ("papernot-steinke", {"mean_runs": 4}, "tests.study.elsewhere:plain_task", plain),
        (
            "everything",
            {"trials": 3, "sampler": "random"},
            "tests.study.elsewhere:plain_task",
            plain,
        ),
        (
            "subsampled-tuning",
            {"rate": 0.4, "mean_runs": 2},
            "tests.study.elsewhere:plain_task",
            plain,
        ),
        ("hyfreedp", {}, "tests.study.elsewhere:plain_task", plain),
        ("fixed", {"parameters": PARAMETERS}, "tests.toy:blobs", blob_model),
    ],
)
def test_a_spec_and_python_give_the_same_bits(
    storage: str, tmp_path: Any, strategy: str, options: dict[str, Any], task: str, build: Build
) -> None:
    """The same task, strategy and seed, once by a spec that names the task, once by objects."""
    arms = [{"name": "arm", "strategy": strategy, **options}]
    space = {} if strategy == "fixed" or build is plain else toy_spec().space
    spec = toy_spec(task=task, arms=arms, space=space, epochs=1, seed=7)
    declared = Study.create(spec, storage)
    (one,) = declared.run()
    study = make(f"sqlite:///{tmp_path / 'other.db'}", seed=7, name="toy")
    other = study.optimize(
        privtune.make_task(build, **OWN), strategy=spec.arms[0].to_strategy(), **TERMS
    )
    assert one.params == other.params
    assert torch.equal(one.weights, other.weights)
    if build is plain:
        assert one.score == other.score
        assert declared.plans[0].event == study.plans[0].event


@pytest.mark.parametrize("average", ["tail", "ema"])
def test_an_optimizer_s_iterates_are_averaged_as_the_method_s(
    storage: str, tmp_path: Any, average: str
) -> None:
    """SGD of torch's and dpsgd take the same steps, so they release the same average."""

    def own(trial: privtune.Trial) -> privtune.Candidate:
        rate = trial.suggest_float("learning_rate", 0.1, 1.0)
        norm = trial.suggest_float("max_grad_norm", 0.1, 1.0)
        return candidate(nn.Linear(6, 3), rate, max_grad_norm=norm)

    given = {"learning_rate": 0.5, "max_grad_norm": 0.3}
    one, other, last = (
        make(f"sqlite:///{tmp_path / name}.db", seed=2).optimize(
            privtune.make_task(build, **OWN),
            strategy=Fixed(parameters=given, options={"average": kind}),
            **TERMS,
        )
        for name, build, kind in (("a", own, average), ("b", plain, average), ("c", own, "last"))
    )
    torch.testing.assert_close(one.weights, other.weights)
    assert one.guarantee == other.guarantee == last.guarantee


def test_the_best_trial_is_released_and_all_are_for_the_curator_alone(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make(storage, seed=1)
    release = study.optimize(
        privtune.make_task(conditional, **OWN), strategy=PapernotSteinke(mean_runs=8), **TERMS
    )
    with pytest.raises(PrivTuneError, match="PRIVTUNE_CURATOR=1 or load the study with curator"):
        _ = study.trials
    curator = privtune.load_study("loop", storage=storage, curator=True)
    assert all(math.isfinite(t.value) for t in curator.trials)
    # What is shown is held to what an accuracy can be; the choice is among the scores themselves.
    assert release.score == min(max(t.value for t in curator.trials), 1.0)
    assert release.params in [t["params"] for t in curator.sealed_trials(study.arms[0])]
    monkeypatch.setenv("PRIVTUNE_CURATOR", "1")
    assert len(privtune.load_study("loop", storage=storage).trials) == len(curator.trials) > 0


def test_subsampled_tuning_trains_on_the_subset_and_then_on_the_rest(storage: str) -> None:
    seen: list[float] = []

    def spy(trial: privtune.Trial) -> privtune.Candidate:
        seen.append(trial.suggest_float("learning_rate", 0.05, 0.2))
        return candidate(nn.Linear(6, 3), seen[-1])

    release = make(storage).optimize(
        privtune.make_task(spy, **OWN),
        strategy=Subsampled(variant=1, rate=0.25, mean_runs=2),
        **TERMS,
    )
    assert 0.05 <= release.params["learning_rate"] <= 0.2, "the space is that of the release"
    # A quarter is tuned on and three are trained on: a third of the rate.
    assert any(3 * rate == pytest.approx(release.params["learning_rate"]) for rate in seen)


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - nn.functional.one_hot(y, 3)).square().mean(dim=1)


def reconstructed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) @ model.weight - x).square().sum(dim=1)


def by_hand(name: str, weights: dict[str, torch.Tensor], x: np.ndarray, y: np.ndarray) -> Any:
    """The losses of records, by NumPy."""
    w, b = (weights[n].double().numpy() for n in ("weight", "bias"))
    outputs = x @ w.T + b
    if name == "reconstructed":
        return ((outputs @ w - x) ** 2).sum(axis=1)
    return ((outputs - np.eye(3)[y]) ** 2).mean(axis=1)


@pytest.mark.parametrize(
    ("form", "function", "bound"),
    [
        ("loss", squared, 0.5),
        ("cost", reconstructed, 0.5),
        ("value", reconstructed, 100.0),
        ("dict", squared, 100.0),
    ],
)
def test_scores_by_a_function_are_clipped_record_by_record(
    storage: str, function: Any, bound: float, form: str
) -> None:
    """On a public split, against the released weights."""

    def named(model: nn.Module, record: dict[str, torch.Tensor]) -> torch.Tensor:
        return function(model, record["x"], record["labels"])

    def small(trial: privtune.Trial) -> privtune.Candidate:
        return candidate(nn.Linear(6, 3), trial.suggest_float("rate", 0.01, 0.1))

    train, held = TRAIN, VALIDATION
    if form == "dict":
        train, held = ({"x": x, "labels": y} for x, y in (TRAIN, VALIDATION))
    score = privtune.Score(
        {"loss": "loss", "dict": named}.get(form, function), bound=bound, maximize=form == "value"
    )
    release = make(storage).optimize(
        privtune.make_task(
            small,
            loss=named if form == "dict" else function,
            score=score,
            train=train,
            public={"validation": held},
        ),
        strategy=PapernotSteinke(mean_runs=2),
        epochs=1,
        expected_batch_size=24,
    )
    x, y = (part.numpy() for part in VALIDATION)
    losses = by_hand(function.__name__, release.state_dict(), x.astype(float), y)
    mean = np.clip(losses, 0.0, bound).mean()
    assert release.score == pytest.approx(mean if form == "value" else -mean, rel=1e-5)


def test_processes_share_a_round_of_what_they_can_import(storage: str, tmp_path: Any) -> None:
    there = f"sqlite:///{tmp_path / 'other.db'}"
    releases = [
        make(url, seed=5).optimize(
            privtune.make_task("tests.study.elsewhere:conditional", **PATHS),
            strategy=PapernotSteinke(mean_runs=4),
            n_jobs=jobs,
            **TERMS,
        )
        for url, jobs in ((storage, 1), (there, 2))
    ]
    assert releases[0].params == releases[1].params
    torch.testing.assert_close(releases[0].weights, releases[1].weights, rtol=1e-4, atol=1e-5)


def test_a_timeout_releases_nothing_and_can_go_on(storage: str) -> None:
    study, strategy = make(storage), PapernotSteinke(mean_runs=3)
    with pytest.raises(StudyInterruptedError, match="call optimize again"):
        study.optimize(
            privtune.make_task(conditional, **OWN), strategy=strategy, timeout=1e-9, **TERMS
        )
    assert not study.releases()
    assert not study.optimize(
        privtune.make_task(conditional, **OWN), strategy=strategy, **TERMS
    ).is_nothing
    assert charges(storage) == 1
    with pytest.raises(PrivTuneError, match="exists with another plan"):
        study.optimize(
            privtune.make_task(conditional, **OWN),
            strategy=PapernotSteinke(mean_runs=5),
            epsilon=6.0,
            **TERMS,
        )


def test_a_second_arm_must_say_what_it_may_cost(storage: str) -> None:
    study = make(storage)
    study.optimize(
        privtune.make_task(conditional, **OWN),
        strategy=PapernotSteinke(mean_runs=2),
        epsilon=2.0,
        **TERMS,
    )
    with pytest.raises(PrivTuneError, match="say what arm 'liu-talwar' may cost"):
        study.optimize(
            privtune.make_task(conditional, **OWN), strategy=LiuTalwar(mean_runs=2), **TERMS
        )
    study.optimize(
        privtune.make_task(conditional, **OWN),
        strategy=LiuTalwar(mean_runs=2),
        epsilon=2.0,
        **TERMS,
    )
    assert study.arms == ("papernot-steinke", "liu-talwar")
    assert study.spent().epsilon <= 6.0


def test_priors_and_a_sampler_of_ones_own(storage: str) -> None:
    class Mine:
        independent = True

        def draw(self, rng: Any) -> dict[str, float]:
            return {"rate": 0.5}

    def own(trial: privtune.Trial) -> privtune.Candidate:
        return candidate(nn.Linear(6, 3), trial.suggest("rate", LogNormal(0.5, 0.2)))

    study, strategy = make(storage), PapernotSteinke(mean_runs=2)
    first = study.optimize(privtune.make_task(own, **OWN), strategy=strategy, epsilon=2.0, **TERMS)
    assert 0.1 < first.params["rate"] < 2.0
    second = study.optimize(
        privtune.make_task(own, **OWN),
        strategy=strategy,
        arm="mine",
        epsilon=2.0,
        sampler=Mine(),
        **TERMS,
    )
    assert second.params["rate"] == 0.5


def test_state_that_a_score_changes_stops_the_arm(storage: str, tmp_path: Path) -> None:
    """What comes late, from sealed records, is no part of a rehearsal."""
    kept = tmp_path / "kept"  # where the checks of the score itself do not look
    begun: list[bool] = []

    def score(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if begun:
            kept.touch()
        return squared(model, x, y)

    def build(trial: privtune.Trial) -> privtune.Candidate:
        return candidate(
            nn.Linear(6, 3), trial.suggest_float("rate", 0.5 if kept.exists() else 0.1, 1.0)
        )

    study = make(storage)
    with pytest.raises(ArmStoppedError):
        study.optimize(
            privtune.make_task(build, score=privtune.Score(score, bound=3.0), **OWN),
            strategy=PapernotSteinke(),
            observer=started(begun),
            **TERMS,
        )
    curated = privtune.load_study("loop", storage=storage, curator=True)
    assert "once trials have been trained" in curated.failures("papernot-steinke")[0]["traceback"]
    assert not study.releases()


def test_a_table_that_each_build_fills_is_refused(storage: str) -> None:
    """Trials are trained after others were built: each would be trained as the last one is."""
    table = torch.zeros(3, 6)

    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = nn.Linear(6, 3)
        model.weight = nn.Parameter(nn.init.normal_(table))
        return candidate(model)

    with pytest.raises(DependentTrialsError, match=r"changes the .* of a trial that was built"):
        make(storage).optimize(
            privtune.make_task(build, **OWN), strategy=PapernotSteinke(), **TERMS
        )
    assert charges(storage) == 0


def test_a_setting_that_each_build_changes_for_the_loss_is_refused(storage: str) -> None:
    setting = {"smoothing": 0.0}

    def build(trial: privtune.Trial) -> privtune.Candidate:
        setting["smoothing"] = trial.suggest_float("smoothing", 0.0, 0.5)
        return candidate(nn.Linear(6, 3))

    def smooth(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given = setting["smoothing"]
        return nn.functional.cross_entropy(model(x), y, reduction="none", label_smoothing=given)

    with pytest.raises(DependentTrialsError, match="changes the passes"):
        make(storage).optimize(
            privtune.make_task(build, **{**OWN, "loss": smooth}),
            strategy=PapernotSteinke(),
            **TERMS,
        )
    assert charges(storage) == 0


def _scheduled(of: Callable[[torch.optim.Optimizer], Any], returned: bool = True) -> Build:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        schedule = of(optimizer)
        return privtune.Candidate(model, optimizer, schedule=schedule if returned else None)

    return build


def _rare(trial: privtune.Trial) -> privtune.Candidate:
    kind = trial.suggest_categorical("norm", ["none", "tanh", "layer", "group", "batch"])
    norms = {"layer": nn.LayerNorm(4), "group": nn.GroupNorm(2, 4), "batch": nn.BatchNorm1d(4)}
    return candidate(nn.Sequential(nn.Linear(6, 4), norms.get(kind, nn.Tanh()), nn.Linear(4, 3)))


rates = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "of",
    [
        lambda o: rates.LambdaLR(o, lambda step: 1.0 / (step + 1)),
        lambda o: rates.ChainedScheduler([rates.LinearLR(o, 0.1), rates.ExponentialLR(o, 0.8)]),
    ],
    ids=["made of a function in build", "of several"],
)
def test_schedules_that_are_made_anew_are_the_same(storage: str, of: Any) -> None:
    make(storage).optimize(
        privtune.make_task(_scheduled(of), **OWN), strategy=PapernotSteinke(mean_runs=2), **TERMS
    )
    assert charges(storage) == 1


def test_a_loss_that_is_one_number_without_an_axis_is_trained(storage: str) -> None:
    def mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    given = {**OWN, "loss": mean}
    del given["validation"]  # a fixed arm chooses by no score
    task = privtune.make_task(lambda trial: candidate(nn.Linear(6, 3)), **given)
    release = make(storage).optimize(task, strategy=Fixed(), **TERMS)
    assert release.score is None
    assert charges(storage) == 1


class _Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x)}


def _logits(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x)["logits"], y, reduction="none")


def _mean_score(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).argmax(1) == y).float().mean()


def suggesting(ask: Callable[[privtune.Trial], object], **options: Any) -> Build:
    """Return a build of a linear model that asks a trial for something."""
    return lambda trial: (ask(trial), candidate(nn.Linear(6, 3), **options))[1]


TUNING = {"strategy": Subsampled(rate=0.25, mean_runs=2)}
REFUSED: list[tuple[Build, dict[str, Any], str]] = [
    (conditional, {"sampler": object()}, "Set `independent = True`"),
    (conditional, {"validation": None}, "no validation"),
    (conditional, {"strategy": LinearScaling()}, r"learning_rate alone.*study.optimize\(space="),
    (conditional, {"strategy": Auto()}, "cannot call a build of yours. Use .* or a task that has"),
    (conditional, {"strategy": PapernotSteinke}, "must be one of privtune.strategies"),
    (conditional, {"n_jobs": "2"}, "n_jobs = '2': must be a whole number"),
    (conditional, {"timeout": math.nan}, "timeout = nan: must be finite seconds above 0"),
    (conditional, {"epsilon": "2"}, "epsilon = '2': must be a finite number"),
    (conditional, {"epochs": None}, "epochs = None: must be given"),
    (conditional, {"epochs": "4"}, "epochs = '4': must be a finite number"),
    (conditional, {"expected_batch_size": None}, "expected_batch_size = None: must"),
    (
        conditional,
        {"expected_batch_size": "4"},
        "expected_batch_size = '4': must be a whole number between",
    ),
    (conditional, {"callbacks": [1]}, "callbacks = .*: must be a list of functions"),
    (conditional, {"score": privtune.Score(_mean_score)}, r"score = \(\): must be one number"),
    (conditional, {"score": "nonsense"}, "'nonsense'.*: must be one of accuracy"),
    (conditional, {"loss": lambda model, x: model(x).sum(dim=1)}, "positional argument"),
    (conditional, {"loss": None}, "loss"),
    (conditional, TUNING, "called learning_rate, but.* or choose another extrapolation"),
    (suggesting(lambda t: t.suggest_int("learning_rate", 1, 3)), TUNING, "by suggest_float"),
    (lambda t: candidate(_Named(6, 3)), {"loss": _logits, "score": "accuracy"}, "outputs = 'dict'"),
    (lambda t: privtune.Candidate(nn.Linear(6, 3)), {}, "must suggest learning_rate"),
    (lambda t: candidate(nn.Linear(6, 3), max_grad_norm=math.nan), {}, "max_grad_norm = nan"),
    (
        lambda t: candidate(nn.Linear(6, 3), trainable="tail"),
        {},
        "must be one of all, head, biases",
    ),
    (
        lambda t: privtune.Candidate(nn.Linear(6, 3), method="hyfreedp", max_grad_norm=1.0),
        {},
        "is set by method 'hyfreedp' itself",
    ),
    (
        suggesting(lambda t: (t.suggest_float("a", 0.1, 0.9), t.suggest_int("a", 1, 4))),
        {},
        "was suggested to this trial before",
    ),
    (
        suggesting(lambda t: t.suggest_float("max_grad_norm", 0.1, 1.0)),
        {},
        "suggested under that name",
    ),
    (_scheduled(lambda o: rates.OneCycleLR(o, 0.5, total_steps=17)), {}, "fails after 18"),
    (_scheduled(lambda o: rates.LinearLR(o, 0.01), returned=False), {}, "nobody would step"),
    (_scheduled(lambda o: rates.LambdaLR(o, lambda step: 0.0)), {}, "not all 0"),
    (lambda t: candidate(nn.Linear(6, 3), math.nan), {}, "finite"),
    (_rare, {}, "treat each record by itself"),
]


@pytest.mark.parametrize(("build", "changes", "said"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_trained_is_refused_before_the_charge(
    storage: str, build: Build, changes: dict[str, Any], said: str
) -> None:
    """Also what a training would meet late, as the end of a schedule."""
    given = {"strategy": PapernotSteinke(), **OWN, **TERMS, "epochs": 10, **changes}
    with pytest.raises(Exception, match=said):
        optimize_own(make(storage), build, **given)
    assert charges(storage) == 0


def test_workers_elsewhere_need_what_they_can_import(storage: str) -> None:
    study = make(storage, executor="external")
    task = privtune.make_task(conditional, **OWN)
    with pytest.raises(InvalidInputError, match=r"executor = 'external': .* workers can import"):
        study.optimize(task, strategy=PapernotSteinke(mean_runs=2), **TERMS)
    assert charges(storage) == 0


def test_a_function_is_no_task(storage: str) -> None:
    study = make(storage)
    said = r"task = 'function': must be a privtune\.Task\. Make one of your function: privtune\.make_task"
    with pytest.raises(InvalidInputError, match=said):
        study.optimize(conditional, strategy=PapernotSteinke(), **TERMS)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="has no build, so nothing says what to train"):
        study.optimize(blobs(), strategy=PapernotSteinke(), **TERMS)


@pytest.mark.parametrize("active", [True, False])
def test_the_users_own_logging_is_stopped(
    storage: str, monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    fake = types.ModuleType("mlflow")
    fake.active_run = lambda: object() if active else None  # type: ignore[attr-defined]
    tools = types.ModuleType("mlflow.utils.autologging_utils")
    tools.AUTOLOGGING_INTEGRATIONS = {"pytorch": {"disable": False}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", tools)
    message = "mlflow.end_run" if active else "mlflow.autolog\\(disable=True\\)"
    with pytest.raises(SealedError, match=message):
        make(storage).optimize(
            privtune.make_task(conditional, **OWN), strategy=PapernotSteinke(mean_runs=2), **TERMS
        )
    assert charges(storage) == 0


def test_an_open_study_has_no_arms_to_run_and_a_declared_one_no_build(storage: str) -> None:
    study = make(storage)
    with pytest.raises(PrivTuneError, match=r"study\.optimize"):
        study.run()
    declared = Study.create(toy_spec(arms=[{"name": "hyfree", "strategy": "hyfreedp"}]), storage)
    with pytest.raises(PrivTuneError, match="Make an open study"):
        declared.optimize(
            privtune.make_task(conditional, **OWN), strategy=PapernotSteinke(), **TERMS
        )


def test_a_progress_bar_says_no_more_than_that_a_sealed_arm_runs(
    storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    release = make(storage, seed=3).optimize(
        privtune.make_task(conditional, **OWN),
        strategy=PapernotSteinke(mean_runs=4),
        show_progress_bar=True,
        **TERMS,
    )
    assert not release.is_nothing
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "papernot-steinke (sealed)" in shown
    assert not re.search(r"\d", shown), "no count, no time"


def test_a_model_is_made_by_the_program_that_ran_the_arm_alone(storage: str) -> None:
    make(storage).optimize(
        privtune.make_task(linear, **OWN), strategy=PapernotSteinke(mean_runs=2), **TERMS
    )
    release = privtune.load_study("loop", storage=storage).release("papernot-steinke")
    with pytest.raises(PrivTuneError, match="load_state_dict"):
        _ = release.model


@pytest.mark.statistical
def test_the_number_of_a_sealed_trial_is_a_draw_of_its_own(storage: str) -> None:
    """Uniform numbers exceed each of these bounds with a probability of 1e-6; the seed is fixed."""
    study = make(storage, seed=3)
    study.optimize(
        privtune.make_task(linear, **OWN),
        strategy=Fixed(parameters={"learning_rate": 0.5}),
        **TERMS,
    )
    training, streams = study.plans[0].training, Streams(bytes(32))
    found = [
        Trial(
            training,
            sealed=True,
            number=number,
            streams=Streams(streams.key("round", number)),
            given={},
        ).number
        for number in range(4000)
    ]
    assert len(set(found)) == len(found)
    assert 0 <= min(found) < 2**23
    assert 2**31 - 2**23 <= max(found) < 2**31
    for size in (2, 7, 10, 20):
        counts = np.bincount(np.array(found) % size, minlength=size)
        assert chisquare(counts).pvalue > 1e-6
        # What follows the position would repeat after every walk through the grid.
        pairs = np.bincount((np.array(found) % size - np.arange(len(found))) % size, minlength=size)
        assert chisquare(pairs).pvalue > 1e-6


def test_numbers_are_optuna_s_where_trials_are_shown_and_drawn_where_they_are_sealed(
    storage: str,
) -> None:
    seen: dict[str, list[int]] = {"all": [], "best": []}
    begun: list[bool] = []

    def asked(trial: privtune.Trial) -> privtune.Candidate:
        if begun:
            seen[arm].append(trial.number)
        return conditional(trial)

    study = make(storage, seed=3)
    for arm, strategy in (("all", Everything(trials=4)), ("best", PapernotSteinke(mean_runs=4))):
        begun.clear()
        study.optimize(
            privtune.make_task(asked, **OWN),
            strategy=strategy,
            arm=arm,
            epsilon=2.5,
            observer=started(begun),
            **TERMS,
        )
    assert [*dict.fromkeys(seen["all"])] == [0, 1, 2, 3]
    assert min(seen["best"]) > 100, "no position"
