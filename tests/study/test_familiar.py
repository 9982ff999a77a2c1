"""Names of Optuna and Opacus: each answered with PrivTune's name, or there."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re

import optuna
import pytest

import privtune
from privtune.errors import PrivTuneError
from privtune.study import SealedTrialsError, Study
from privtune.study.familiar_names import ANSWER_OF, HOME_OF, FamiliarNameError, answers, unknown
from privtune.study.spec import SpecFields
from tests.study.conftest import toy_spec

EVERYTHING = {"name": "all", "strategy": "everything", "trials": 3, "sampler": "random"}
SELECTION = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
BUDGET = privtune.Budget(4.0, 1e-5, name="familiar")


@pytest.fixture
def ran(storage: str) -> Study:
    study = Study.create(toy_spec(arms=[EVERYTHING]), storage)
    study.run()
    return study


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(ANSWER_OF))
def test_each_answer_is_one_sentence(name):
    text = str(unknown("a study", name))
    assert text.startswith(f"{name}: ")
    assert text.endswith(".")
    assert not re.search(r"\.\s+[A-Z]", text), "two sentences"


@pytest.mark.quick
def test_names_that_answers_recommend_are_there():
    """Of the package, a study, a release: what a sentence sends people to must not send them on."""
    homes = {
        "privtune.": privtune,
        "study.": Study,
        "release.": privtune.strategies.Release,
        "trial.": privtune.Trial,
    }
    later = {"mechanism"}
    found = 0
    for text in ANSWER_OF.values():
        for start, home in homes.items():
            for path in re.findall(rf"(?<![\w.]){re.escape(start)}([a-z_A-Z.]+)", text):
                where = home
                for part in path.rstrip(".").split("."):
                    if part in ("name", *later) and where is Study:  # made by __init__
                        continue
                    if part == "tracking":  # a package that is imported by its path
                        break
                    where = getattr(where, part)
                    found += 1
    assert found > 50


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(HOME_OF))
def test_an_argument_is_sent_to_a_call_that_takes_it(name):
    path, _, _ = HOME_OF[name].partition("(")
    owner, _, function = path.partition(".")
    home = {"privtune": privtune, "study": Study}[owner]
    names = set(inspect.signature(getattr(home, function)).parameters)
    if function == "create_study":
        names |= set(SpecFields.__annotations__)
    assert name in names


@pytest.mark.quick
def test_what_a_task_takes_is_sent_there():
    names = set(inspect.signature(privtune.make_task).parameters)
    assert names == {name for name, call in HOME_OF.items() if "make_task" in call}


@pytest.mark.parametrize("name", ["trials_dataframe", "enqueue_trial", "ask", "tell", "best_trial"])
def test_a_study_answers_for_what_it_lacks(name, storage):
    study = privtune.create_study("open", budget=BUDGET, storage=storage)
    assert not hasattr(study, name)
    with pytest.raises(FamiliarNameError, match=name):
        getattr(study, name)
    with pytest.raises(AttributeError, match="'Study' object has no attribute 'compar'"):
        study.compar()


@pytest.mark.quick
def test_the_package_answers_for_what_it_lacks():
    for name in ("PrivacyEngine", "make_private", "samplers", "TrialPruned"):
        with pytest.raises(FamiliarNameError, match=name):
            getattr(privtune, name)
    with pytest.raises(AttributeError, match="module 'privtune' has no attribute 'nothing'"):
        privtune.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'PrivacyEngine'"):
        from privtune import PrivacyEngine  # noqa: F401


@pytest.mark.quick
@pytest.mark.parametrize("name", ["study_name", "direction", "directions", "sampler", "pruner"])
def test_arguments_of_optunas_are_answered_and_others_refused_by_python(name):
    with pytest.raises(FamiliarNameError, match=f"{name}: "):
        privtune.create_study(**{name: "mine"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        privtune.create_study("mine", nmae=3, budget=BUDGET)


def test_optimize_answers_for_n_trials_before_it_asks_for_a_strategy(storage):
    study = privtune.create_study("open", budget=BUDGET, storage=storage)
    with pytest.raises(FamiliarNameError, match="PapernotSteinke"):
        study.optimize(lambda trial: 0.0, n_trials=100)
    with pytest.raises(TypeError, match="strategy"):
        study.optimize(lambda trial: 0.0, sampler=None)  # which it takes


@pytest.mark.quick
def test_a_failing_property_says_its_own_error():
    class Broken:
        __getattr__ = privtune.study.familiar_names.answer

        @property
        def trials(self):
            return self.nothing_of_this_name

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        Broken().trials  # noqa: B018
    assert copy.copy(Broken()) is not None


@pytest.mark.quick
def test_a_function_that_takes_a_familiar_argument_gets_it():
    @answers
    def take(sampler: int = 0) -> int:
        return sampler

    assert take(sampler=3) == 3


def test_without_one_release_the_best_is_not_known(storage):
    spec = toy_spec(arms=[dict(toy_spec().arms[0].model_dump(exclude_none=True)), SELECTION])
    study = Study.create(spec, storage)
    says = r"the arms defaults, selection, of which none are released.*study.compare\(\)"
    with pytest.raises(PrivTuneError, match=says):
        study.best_params  # noqa: B018
    study.run()
    with pytest.raises(PrivTuneError, match="of which defaults, selection are released"):
        study.best_value  # noqa: B018
    assert study.release("defaults").number == 0
    assert study.release("defaults").value is None
    selection = study.release("selection")
    assert selection.number is None, "it would tell how many trials there were"
    assert selection.value == selection.score
    with pytest.raises(PrivTuneError, match="trials of arm 'defaults' are none: it trains once"):
        study.release("defaults").to_optuna()
    with pytest.raises(PrivTuneError, match="trials of arm 'selection' are sealed"):
        study.release("selection").to_optuna()
    with pytest.raises(SealedTrialsError, match="PRIVTUNE_CURATOR=1"):
        study.trials  # noqa: B018


def test_an_arm_that_pays_for_all_shows_all_and_nothing_that_is_sealed(ran, storage):
    release = ran.release("all")
    for found in (release.to_optuna(), pickle.loads(pickle.dumps(release)).to_optuna()):
        assert [trial.value for trial in found.trials] == [trial.score for trial in release.trials]
        assert [trial.params for trial in found.trials] == [
            trial.params for trial in release.trials
        ]
        assert found.best_value == release.score == release.value
        assert found.best_trial.number == release.number
        law = found.trials[0].distributions["learning_rate"]
        assert (law.low, law.high, law.log) == (0.05, 5.0, True)
        figure = optuna.visualization.plot_slice(found)
        assert len(figure.data) == 2
    curated = Study(ran.name, storage, curator=True)
    for trial, kept in zip(ran.trials, curated.trials, strict=True):
        assert trial.params == kept.params
        assert "unusable" in kept.user_attrs or kept.datetime_complete  # which stay here
        assert trial.user_attrs == {}
        assert trial.system_attrs == {}
        # A realised time tells the sizes of samples: what is shown was made now, all of it at once.
        assert trial.datetime_start is None or trial.duration.total_seconds() < 0.1
    assert (ran.best_params, ran.best_value) == (release.params, release.score)
    assert math.isfinite(ran.best_value)
    assert repr(ran).startswith(
        "<Study 'toy' of tests.toy:blobs: all; budget 'toy' (ε = 6, δ = 1e-05), "
    )
