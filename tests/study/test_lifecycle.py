"""Races for one study, and deaths at every step: nothing is lost, doubled, or released twice."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import privtune
from privtune.errors import PrivTuneError
from privtune.ledger import Ledger, verify
from privtune.study import Study, delete_study, study_names
from privtune.study.lifecycle import Life
from tests.ledger.campaigns import processes
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.study import driven
from tests.study.conftest import PARAMETERS, toy_spec
from tests.study.elsewhere import OWN, TERMS, simple

LOG = logging.getLogger("campaign")
FULL = os.environ.get("PRIVTUNE_CAMPAIGN") == "full"
WORKERS = 64 if FULL else 5
KILLS = int(os.environ.get("PRIVTUNE_KILLS", "200" if FULL else "7"))
IMPORTS = KILLS // 7
FEW = 3  # of them on PostgreSQL, where a study takes longest, if not at full length
SEED = int(os.environ.get("PRIVTUNE_KILLS_SEED", "5"))
WARMED = "tests.study.warmed"
BUSY = ("StudyBusyError",)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def fresh(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    """Make an empty storage at each call."""
    monkeypatch.chdir(tmp_path)
    if request.param == "sqlite":
        numbers = itertools.count()
        yield lambda: f"sqlite:///{tmp_path / f'{next(numbers)}.db'}"
        return
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    made = itertools.count()

    def schema() -> str:
        monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / f"{next(made)}"))
        return schemas.fresh()

    with PostgresSchemas() as schemas:
        yield schema


@pytest.fixture
def url(fresh: Callable[[], str]) -> str:
    return fresh()


def raced(target: Callable[..., None], url: str, *extra: str) -> list[tuple[str, Any]]:
    """Let processes do the same thing at once, or one thing each; return what they say."""
    context = processes(WARMED)
    gate, results = context.Event(), context.Queue()
    shares = [(name,) for name in extra] or [()] * WORKERS
    started = [context.Process(target=target, args=(url, gate, results, *own)) for own in shares]
    for process in started:
        process.start()
    gate.set()
    said = [results.get(timeout=300) for _ in started]
    for process in started:
        process.join(60)
    assert "failed" not in dict(said), dict(said)["failed"]
    return said


def charges(url: str, budget: str) -> list[str]:
    with Ledger(url) as ledger:
        verify(ledger.log.storage, budget)
        return [str(charge.state) for charge in ledger.charges(budget)]


@pytest.mark.slow
def test_processes_that_run_one_study_run_it_once(url: str) -> None:
    Study.create(toy_spec(seed=1), url).close()
    said = raced(driven.run, url)
    assert [words for kind, words in said if kind == "done"] == [
        ["defaults", "selection", "hyfree"]
    ]
    assert {kind for kind, _ in said} <= {"done", *BUSY}
    assert all(len(words.splitlines()) == 1 for kind, words in said if kind != "done")
    assert charges(url, "toy") == ["settled"] * 3
    with closing(Study("toy", url)) as study:
        assert len(study.releases()) == 3


@pytest.mark.slow
def test_processes_that_charge_one_study_charge_it_once(url: str) -> None:
    """Whatever keeps processes apart: the charge itself is idempotent."""
    Study.create(toy_spec(), url).close()
    said = raced(driven.charge, url)
    assert {str(words) for _, words in said} == {"['toy-1', 'toy-2', 'toy-3']"}
    assert charges(url, "toy") == ["reserved"] * 3


@pytest.mark.slow
def test_processes_that_add_arms_to_one_study_lose_none(url: str) -> None:
    privtune.create_study("open", budget=driven.OPEN, storage=url).close()
    names = [f"{('arm', 'selection')[number % 2]}-{number}" for number in range(WORKERS)]
    said = raced(driven.add, url, *names)
    assert {kind for kind, _ in said} == {"done"}, said
    assert sorted(words[0] for _, words in said) == sorted(names)
    with closing(Study("open", url)) as study:
        assert sorted(study.arms) == sorted(r.arm for r in study.releases()) == sorted(names)
    assert charges(url, "open") == ["settled"] * WORKERS


@pytest.mark.slow
def test_processes_that_add_the_same_arm_add_it_once(url: str) -> None:
    privtune.create_study("open", budget=driven.OPEN, storage=url).close()
    said = raced(driven.add, url, *["arm"] * WORKERS)
    assert [kind for kind, _ in said].count("done") == 1
    assert {kind for kind, _ in said} <= {"done", *BUSY}
    with closing(Study("open", url)) as study:
        assert study.arms == ("arm",)
    assert charges(url, "open") == ["settled"]


def outputs(url: str) -> dict[str, Any]:
    """Return what the study released and settled, by arm."""
    with closing(Study("toy", url)) as study, Ledger(url) as ledger:
        settled = {charge.arm: charge.transcript_digest for charge in ledger.charges("toy")}
        return {
            r.arm: (r.params, r.score, r.curves, settled[r.arm], r.weights.numpy().tobytes())
            for r in study.releases()
        }


_IMPORTING = """
import os, signal, sys
names = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        names.append(name)
        if len(names) == {point}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.meta_path.insert(0, Finder())
from privtune.cli import main
sys.argv = ["privtune", *{words}]
main()
"""


def dies_importing(url: str, point: int) -> None:
    """Run the study `toy` by its command, and die when it looks for its n-th module."""
    code = _IMPORTING.format(point=point, words=driven.command(url))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_a_study_that_is_killed_anywhere_goes_on_to_the_same_release(
    fresh: Callable[[], str],
) -> None:
    """SIGKILL at imports, before and after commits, transitions, trainings and checkpoints."""
    arms = [
        {"name": "fixed", "strategy": "fixed", "parameters": PARAMETERS},
        {"name": "hyfree", "strategy": "hyfreedp"},
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
    ]
    spec = toy_spec(seed=2, epochs=1, arms=arms)
    context = processes(WARMED)

    def made() -> str:
        url = fresh()
        Study.create(spec, url).close()
        return url

    def run(target: Callable[..., None], *args: Any) -> int | None:
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        process.join(300)
        return process.exitcode

    url, seen = made(), context.SimpleQueue()
    assert run(driven.points, url, seen) == 0
    where = seen.get()
    expected = outputs(url)
    rng = random.Random(SEED)
    # Each kind of point once, if there is time for it; then any.
    chosen = sorted({where.index(stage) for stage in set(where)})
    if FULL:
        chosen += rng.choices(range(len(where)), k=KILLS - IMPORTS - len(chosen))
    else:
        most = FEW if url.startswith("postgresql") else KILLS
        chosen = rng.sample(chosen, most - IMPORTS)
    kinds: Counter[str] = Counter()
    for point in [*chosen, *[None] * IMPORTS]:
        url = made()
        at = "import" if point is None else where[point]
        kinds[at.partition(":")[0]] += 1
        if point is None:
            dies_importing(url, rng.randrange(1, 1500))
        else:
            assert run(driven.die, url, point) == -signal.SIGKILL, at
        assert len(charges(url, "toy")) in (0, 3), "all arms are charged together"
        with closing(Study("toy", url)) as study:
            study.run(stack=1)
        assert outputs(url) == expected, at
        assert charges(url, "toy") == ["settled"] * 3, at
        LOG.info(f"killed at {at}: nothing lost or doubled, the same release")
    LOG.info(
        f"{url.split(':', maxsplit=1)[0]}: seed {SEED}, kills {dict(kinds)} at {len(where)} points"
    )


def test_what_was_refused_leaves_no_arm_behind(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    budget = privtune.Budget(1.0, 1e-5, name="open")
    study = privtune.create_study("open", budget=budget, storage=storage)
    options: dict[str, Any] = {"strategy": privtune.strategies.Fixed(), **TERMS}
    task = privtune.make_task(simple, **OWN)
    with pytest.raises(privtune.PrivTuneError):
        study.optimize(task, epsilon=2.0, **options)
    assert study.arms == ()
    assert not study.optimize(task, epsilon=0.5, **options).is_nothing


def test_a_second_runner_is_told_in_one_sentence(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(), storage)
    other = Study("toy", storage)
    with (
        study._life.alone(),
        pytest.raises(privtune.PrivTuneError, match="run by another process") as caught,
    ):
        other.run()
    assert len(str(caught.value).splitlines()) == 1
    assert charges(storage, "toy") == []
    assert len(other.run()) == 3


@pytest.mark.parametrize("arm", [None, "defaults"])
def test_what_is_being_run_is_not_deleted(url: str, arm: str | None) -> None:
    """Else a run that is charged already would end at rows that are gone."""
    spec = toy_spec(name="kept", arms=toy_spec().model_dump()["arms"][:1])
    with closing(Study.create(spec, url)) as study, closing(Study("kept", url)) as other:
        with (
            study._life.alone(arm),
            pytest.raises(privtune.PrivTuneError, match="run by another process"),
        ):
            other.delete()
        assert [arm.state for arm in study.status()] == ["planned"]
        study.delete()
    assert "kept" not in study_names(url)


def test_who_comes_back_after_a_deletion_writes_to_no_other_study_of_the_name(url: str) -> None:
    """Rows are found by name: what was trained on one charge is never handed in on another's."""
    Study.create(toy_spec(epsilon=2.0), url).close()
    with closing(Life("toy", url)) as old:
        plans = list(old.plans().values())
        (plan,) = (plan for plan in plans if plan.runs is not None)
        old.charge(plans)
        delete_study("toy", url)
        Study.create(toy_spec(epsilon=1.0), url).close()
        results, gone = old.sealed(plan.arm), "was deleted while this process worked for it"
        late: list[Callable[[], object]] = [
            lambda: results.put("trial-000000.safetensors", b"trained on the charge of before"),
            lambda: old.keep(plan, {}, {"model.safetensors": b""}),
            lambda: old.record_failure(plan.arm, ValueError()),
            lambda: old.charge(plans),
            old.delete,
        ]
        for write in late:
            with pytest.raises(PrivTuneError, match=gone):
                write()
    with closing(Life("toy", url)) as new:
        assert new.sealed(plan.arm).names() == []
        assert new.failures(plan.arm) == []
        assert all(arm.release is None and arm.secret for arm in new.arms().values())
    assert charges(url, "toy") == ["reserved"] * 3


def test_a_study_is_deleted_where_its_folder_cannot_be_made(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(), storage)
    (tmp_path / "privtune-artifacts").write_text("a file is in the way")
    study.delete()
    assert study_names(storage) == []


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    Study.create(toy_spec(), storage).close()
    code = (
        "import os, signal; from privtune.study.lifecycle import Life\n"
        f"with Life('toy', {storage!r}).alone(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    with Study("toy", storage)._life.alone():
        pass
