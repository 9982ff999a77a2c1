"""Trials that are paid for and shown, as rows that workers share: the same release, the same charge."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import privtune
from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError
from privtune.execution.table import make_rounds
from privtune.ledger import Budget, ChargeRequest, ChargeStateError, Ledger
from privtune.ledger.rounds import Rounds
from privtune.strategies import Everything
from privtune.study import Study, arm_rounds
from privtune.study.lifecycle import Life, Stage
from privtune.study.workers import serve
from tests.ledger.campaigns import processes
from tests.ledger.conftest import complete_one, lease_one
from tests.study.conftest import toy_spec
from tests.study.elsewhere import PATHS, TERMS, optimize_own
from tests.study.test_lifecycle import WARMED
from tests.study.test_workers import charges, drive, worker

PATH = "tests.study.elsewhere:conditional"


def spec(**options: Any) -> Any:
    arm = {"name": "arm", "strategy": "everything", "sampler": "random", "trials": 6, **options}
    return toy_spec(arms=[arm], seed=4, epochs=1)


def same(one: Any, two: Any) -> None:
    """Hold two releases of everything against each other."""
    assert one.params == two.params
    assert one.guarantee == two.guarantee
    assert len(one.trials) == len(two.trials)
    for here, there in zip(one.trials, two.trials, strict=True):
        assert here.index == there.index
        assert here.params == there.params
        assert here.transcript_digest == there.transcript_digest
        # Sums of a stack round otherwise; other noise would differ by whole units.
        assert torch.allclose(here.weights, there.weights, rtol=1e-3, atol=1e-2)


def kept(url: str, study: str) -> list[tuple[Any, ...]]:
    """Return what Optuna's storage has of an arm's trials."""
    trials = privtune.load_study(study, storage=url, curator=True).trials
    return [(t.params, t.distributions, t.state, t.intermediate_values) for t in trials]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have rows trained as workers do, in this process; return how many were given out at once."""
    batches: list[int] = []

    def give_out(executor: Any, life: Life, plan: Any, *, compute: Any, notify: Any) -> Any:
        if executor.name == "inline":
            return None

        def give(rounds: Rounds, charge_id: str) -> None:
            batches.append(rounds.open_count(charge_id))
            serve(life.url, idle_exit=0.0)

        return give

    monkeypatch.setattr("privtune.study.run.give_out", give_out)
    return batches


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"sampler": "random"}, [6]),
        ({"sampler": "grid"}, [6]),
        ({"sampler": "tpe", "batch": 3, "trials": 6}, [3, 3]),
        ({"sampler": "tpe", "trials": 3}, []),
    ],
)
def test_workers_train_the_trials_of_one_process(
    storage: str, tmp_path: Path, given: list[int], options: dict[str, Any], batches: list[int]
) -> None:
    inline = f"sqlite:///{tmp_path / 'inline.db'}"
    (expected,) = Study.create(spec(**options), inline).run()
    (release,) = Study.create(spec(**options), storage).run(executor="external")
    same(release, expected)
    assert given == batches, "a batch is given out whole; a single trial is trained here"
    assert kept(storage, "toy") == kept(inline, "toy")
    assert charges(storage, "toy") == 1


def optimized(url: str, build: Any, **options: Any) -> Any:
    strategy = options.pop("strategy", Everything(trials=5, sampler="random"))
    budget = privtune.Budget(4.0, 1e-5, name="b")
    repeats = options.pop("repeats", 1)
    executor = options.pop("executor", None)
    study = privtune.create_study(
        "s", budget=budget, storage=url, seed=3, repeats=repeats, executor=executor
    )
    return optimize_own(study, build, strategy=strategy, **PATHS, **TERMS, **options)


@pytest.mark.parametrize(
    "strategy",
    [
        Everything(trials=5, sampler="random"),
        Everything(trials=14, sampler="tpe", batch=7),
    ],
)
def test_workers_draw_for_a_function_what_one_process_draws(
    storage: str, tmp_path: Path, given: list[int], strategy: Everything
) -> None:
    inline = f"sqlite:///{tmp_path / 'inline.db'}"
    expected = optimized(inline, PATH, strategy=strategy)
    assert not given
    release = optimized(storage, PATH, strategy=strategy, executor="external")
    same(release, expected)
    assert given
    assert kept(storage, "s") == kept(inline, "s")
    assert charges(storage, "b") == 1


def test_workers_draw_a_repetition_s_trials_from_those_before_it(
    storage: str, tmp_path: Path, given: list[int]
) -> None:
    inline = f"sqlite:///{tmp_path / 'inline.db'}"
    terms = {"strategy": Everything(trials=14, sampler="tpe", batch=7), "benchmark": True}
    expected = optimized(inline, PATH, repeats=2, **terms)
    release = optimized(storage, PATH, repeats=2, executor="external", **terms)
    assert given
    assert release.repetitions == expected.repetitions
    drawn = []
    for url in (inline, storage):
        with closing(Life("s", url)) as life:
            drawn.append([trial.params for trial in life.trials.of("everything/1")])
    assert len(drawn[0]) == 14
    assert drawn[0] == drawn[1]


def test_optuna_s_own_objects_stay_in_one_process(storage: str, given: list[int]) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=9)
    with pytest.raises(InvalidInputError, match="n_jobs = 2: does not go with a sampler or pruner"):
        optimized(storage, PATH, pruner=pruner, n_jobs=2)
    assert given == []


def dying(url: str, folder: str) -> None:
    """Be a worker that is killed after its second row, with results of others not handed in."""
    hand_in = Rounds.complete_some

    def complete_some(self: Any, results: Any) -> frozenset[int]:
        if Path(folder, "second").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        Path(folder, "second" if Path(folder, "first").exists() else "first").touch()
        return hand_in(self, results)

    arm_rounds._SMALL = -1  # those of a stack one after the other, as large results are
    Rounds.complete_some = complete_some  # type: ignore[method-assign]
    serve(url, idle_exit=600.0)


@pytest.mark.slow
def test_a_worker_and_a_driver_are_killed_in_mid_batch(storage: str, tmp_path: Path) -> None:
    (expected,) = Study.create(spec(), f"sqlite:///{tmp_path / 'inline.db'}").run()
    Study.create(spec(), storage).close()
    context = processes(WARMED)
    driver = context.Process(target=drive, args=(storage,))
    dies = context.Process(target=dying, args=(storage, str(tmp_path)))
    driver.start()
    dies.start()
    dies.join(600)
    driver.kill()
    driver.join()
    assert dies.exitcode == -signal.SIGKILL
    with closing(Life("toy", storage)) as life:
        (arm,) = life.arms().values()
        assert life.stage(arm.plan) is Stage.STARTED
        results = life.sealed("arm")
        done = [name for name in results.names() if name.endswith(".safetensors")]
        assert len(done) == 2
        before = {name: results.get(name) for name in done}
    with worker(storage), closing(Study("toy", storage)) as study:
        (release,) = study.run(executor="external")
    same(release, expected)
    assert charges(storage, "toy") == 1
    trials = {trial.index: trial for trial in release.trials}
    for name, content in before.items():
        digest = trials[int(name.removeprefix("trial-").partition(".")[0])].transcript_digest
        assert digest.encode() in (content or b""), "the first result of a row stays"


def test_only_a_started_charge_has_rows(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path / 'p.db'}") as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
        [charge] = ledger.reserve("b", [ChargeRequest(Gaussian(20.0))])
        rounds, secret = make_rounds(ledger), bytes(range(32))
        with pytest.raises(ChargeStateError, match="reserved"):
            rounds.propose(charge.id, [0], secret=secret)
        ledger.start(charge.id)
        rounds.propose(charge.id, [0, 1], secret=secret)
        lease = lease_one(rounds, charge.id, "one")
        assert lease is not None
        assert complete_one(rounds, lease, 0.5, {})
        held = lease_one(rounds, charge.id, "one")
        rounds.propose(charge.id, [1, 2], secret=secret)
        assert rounds.open_count(charge.id) == 2
        late = lease_one(rounds, charge.id, "two")
        assert held is not None
        assert late is not None
        assert (held.number, late.number) == (1, 2), "leases stay"
        rounds.propose(charge.id, [0], secret=secret)
        again = lease_one(rounds, charge.id, "three")
        assert again is not None
        assert (again.number, again.seed) == (0, lease.seed), "its result was lost"
        ledger.settle(charge.id)
        with pytest.raises(ChargeStateError, match="settled"):
            rounds.propose(charge.id, [3], secret=secret)
