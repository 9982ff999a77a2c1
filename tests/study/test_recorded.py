"""The trials of a round: handed in with their stack, read at once, recorded once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from privtune.execution import trial_training
from privtune.ledger import backup
from privtune.ledger.rounds import Rounds, Submission
from privtune.spaces import SearchSpace, categorical
from privtune.strategies import TrialResult
from privtune.study import Study
from privtune.study.arm_rounds import TrialFiles
from privtune.study.rows import Results
from privtune.study.trials import StudyTrials, from_storage, lay_out_copy
from tests.ledger.conftest import ledger_url, postgres_url, sqlite_url
from tests.study.conftest import PARAMETERS, toy_spec

__all__ = ["ledger_url", "postgres_url", "sqlite_url"]

SPACE = SearchSpace(
    {
        "rate": FloatDistribution(1e-3, 10.0, log=True),
        "layers": IntDistribution(1, 4),
        "kind": CategoricalDistribution(("wide", "deep", None)),
    }
)
SCORES = (0.5, -math.inf, math.nan, None, 0.25)


def result(index: int, **more: Any) -> TrialResult:
    params = {"rate": 0.1 * (index + 1), "layers": 1 + index % 4, "kind": (None, "deep")[index % 2]}
    score = SCORES[index % len(SCORES)]
    return TrialResult(
        index=index, params={**params, **more}, weights=torch.empty(0), score=score, unusable=index
    )


@pytest.fixture
def trials(ledger_url: str) -> Iterator[StudyTrials]:
    spec = toy_spec()
    with closing(Study.create(spec, ledger_url)) as study:
        yield study._life.trials


def shown(trials: Sequence[FrozenTrial]) -> list[tuple[Any, ...]]:
    """What trials say, without their times."""
    return [
        (t.number, t.state, repr(t.value), t.params, t.distributions, t.user_attrs) for t in trials
    ]


def test_trials_are_recorded_once_and_optuna_goes_on_from_there(trials: StudyTrials) -> None:
    results = [result(n, rate=99.0) if n == 2 else result(n, other=[n]) for n in range(9)]
    trials.record("arm", space=SPACE, results=results[:4])
    trials.record("arm", space=SPACE, results=results[1:4])  # the first record of a round stays
    trials.record("arm", space=SPACE, results=results[4:], repetition=1)
    assert not trials._home.has_table("trials"), "written when the curator looks"
    found = trials.of("arm")
    assert [(t.number, t.user_attrs["unusable"]) for t in found] == [(n, n) for n in range(9)]
    assert found[2].user_attrs["params:rate"] == 99.0, "outside of the space"
    assert [t.value for t in found[:5]] == [0.5, -math.inf, -math.inf, -math.inf, 0.25]
    for _ in range(2):
        trials.lay_out("arm")
    with trials._home.lend():
        ours = trials._open("arm")
        assert shown(ours.trials) == shown(found)
        ours = trials._open("arm")
        ours.tell(ours.ask(dict(SPACE)), 1.0)
    assert (ours.best_value, ours.trials[-1].number) == (1.0, 9)


def test_tuples_are_the_same_choices_in_a_record_and_texts_in_optuna_s_tables(
    trials: StudyTrials,
) -> None:
    space = SearchSpace({"shape": categorical("shape", ((1, 2), (3, (4, 5)), "one"))})
    chosen = ((3, (4, 5)), "one", (1, 2))
    results = [
        TrialResult(index=n, params={"shape": value}, weights=torch.empty(0), score=0.5)
        for n, value in enumerate(chosen)
    ]
    trials.record("arm", space=space, results=results)
    assert [trial.params["shape"] for trial in trials.of("arm")] == list(chosen)
    trials.lay_out("arm")
    with trials._home.lend():
        stored = trials._open("arm").trials
    assert [from_storage(trial).params["shape"] for trial in stored] == list(chosen)


def test_a_backup_has_sealed_trials_in_optuna_s_tables(storage: str, tmp_path: Path) -> None:
    arm = {"name": "arm", "strategy": "papernot-steinke", "law": "binomial", "n": 5}
    spec = toy_spec(arms=[{**arm, "mean_runs": 5}], epochs=1, repeats=2)
    with closing(Study.create(spec, storage)) as study:
        study.run()
        recorded = study._life.trials.of("arm")
        backup(study._life.storage, tmp_path / "copy.db")
    assert sa.inspect(sa.create_engine(storage)).has_table("trials") is False
    for _ in range(2):  # as after one that was stopped
        lay_out_copy(tmp_path / "copy.db")
    copy = optuna.load_study(
        study_name=f"{study.name}/arm", storage=f"sqlite:///{tmp_path / 'copy.db'}"
    )
    assert shown(copy.trials) == shown(recorded)
    assert len(recorded) == 10


def test_a_stack_hands_in_its_results_in_one_transaction(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    whole = Rounds.complete_some

    def complete_some(self: Rounds, results: Sequence[Submission]) -> frozenset[int]:
        batches.append(len(results))
        return whole(self, results)

    monkeypatch.setattr(Rounds, "complete_some", complete_some)
    monkeypatch.setattr(TrialFiles, "at_once", 8)
    count = 8 + 3
    arm = {"name": "arm", "strategy": "papernot-steinke", "law": "binomial", "n": count}
    spec = toy_spec(arms=[{**arm, "mean_runs": count}], epochs=1)
    with closing(Study.create(spec, storage)) as study:
        study.run()
        recorded = study._life.trials.of("arm")
    assert batches == [8, 3]
    assert [trial.user_attrs["privtune:index"] for trial in recorded] == list(range(count))


def test_small_results_are_read_together_and_large_ones_are_left_out(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 8)
    monkeypatch.setattr("privtune.study.rows._NAMES_AT_ONCE", 2)
    for number in range(5):
        results.put(f"{number}", bytes([number]))
    results.put("large", bytes(9))
    found = results.get_small([*map(str, range(5)), "large", "none"])
    assert found == {f"{number}": bytes([number]) for number in range(5)}


def test_arms_that_cost_the_same_a_step_are_rehearsed_once(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trial_training.seconds_per_step

    def timed(clock: Any, *, steps: int, threads: int) -> float:
        stacks.append((len(clock) - 1) // steps)
        return whole(clock, steps=steps, threads=threads)

    stacks: list[int] = []
    monkeypatch.setattr(trial_training, "seconds_per_step", timed)
    fixed = {"strategy": "fixed", "parameters": PARAMETERS}
    selection = {"strategy": "papernot-steinke", "mean_runs": 4}
    arms = [{"name": "a", **fixed}, {"name": "b", **fixed}, {"name": "c", **selection}]
    with closing(Study.create(toy_spec(arms=arms), storage)) as study:
        study.run()
    assert len(stacks) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is then the GPU")
def test_expected_seconds_are_of_the_cpu_where_auto_is_the_cpu(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be those of the wall, and say what other programs did."""
    clocks: set[str] = set()
    dry_run = trial_training._DryRun
    whole = dry_run._read_clock

    def read_clock(self: Any) -> float:
        clocks.add(self.compute.device)
        return whole(self)

    monkeypatch.setattr(dry_run, "_read_clock", read_clock)
    arm = {"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}
    with closing(Study.create(toy_spec(arms=[arm], device="auto"), storage)) as study:
        study.run()
    assert clocks == {"cpu"}
