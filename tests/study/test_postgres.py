"""A whole study with its ledger and its store on PostgreSQL; and storages that cannot be used."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from privtune.ledger import Ledger
from privtune.ledger.schema import arms
from privtune.study import Study, arm_rounds
from privtune.study.lifecycle import Life
from privtune.study.rows import StudyStore
from tests.cli.conftest import Cli, cli
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.study.conftest import FIXED, toy_spec

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SPEC = toy_spec(
    name="served",
    arms=[
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
        {"name": "all", "strategy": "everything", "trials": 2},
    ],
    epochs=1,
).model_dump(mode="json")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh schema; models go below the test's folder."""
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with PostgresSchemas() as schemas:
        yield schemas.fresh()


@pytest.mark.postgres
@pytest.mark.slow
def test_a_study_lives_on_postgres(
    served: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    monkeypatch.setenv("PRIVTUNE_STORAGE", served)
    assert cli("study", "create", str(spec)).code == 0
    again = cli("study", "create", str(spec))
    assert again.code == 1
    assert "exists already" in again.err

    run = cli("study", "run", "served", "--no-mlflow", "--json")
    assert run.code == 0, run.err
    document = json.loads(run.out)
    assert [arm["state"] for arm in document["arms"]] == ["settled", "settled"]
    assert document["budget"]["charged"] <= 6.0
    finished = cli("study", "run", "served")
    assert (finished.code, "nothing was spent" in finished.out) == (0, True)
    with Ledger(served) as ledger:
        assert len(ledger.charges("toy")) == 2

    compared = cli("study", "compare", "served", "--json")
    assert json.loads(compared.out)["arms"] == document["arms"]
    logged = cli("study", "sync", "served", "--json")
    assert json.loads(logged.out)["logged"] == ["selection", "all"]
    assert "Nothing to log" in cli("study", "sync", "served").out
    assert cli("budget", "verify", "toy").code == 0
    assert [study["name"] for study in json.loads(cli("study", "list", "--json").out)] == ["served"]

    assert cli("study", "delete", "served", "--yes").code == 0
    with Ledger(served) as ledger:
        assert len(ledger.charges("toy")) == 2, "charges stay"


@pytest.mark.postgres
def test_a_study_goes_on_from_another_directory(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, results and models are where the database is; a file of a model is written anew."""
    monkeypatch.delenv("PRIVTUNE_ARTIFACTS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    study = Study.create(toy_spec(seed=1), served)
    assert study.folder.is_relative_to(tmp_path / "data")
    train, calls = arm_rounds.train_trials, []

    def stops(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # after the fixed arm and a row of the round
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(arm_rounds, "train_trials", stops)
    with pytest.raises(KeyboardInterrupt):
        study.run(stack=1)
    study.close()
    shutil.rmtree(tmp_path / "data")  # as on another host, which has none of it

    monkeypatch.chdir(tmp_path / "there")
    with closing(Study("toy", served)) as again:
        released = again.run(stack=1)
        assert [release.arm for release in released] == ["defaults", "selection", "hyfree"]
        assert len(calls) == 3 + 3, "the row that was done is not run again"
        assert again.model_path("selection").exists()
        assert again.model_path("defaults").exists()
    with Ledger(served) as ledger:
        assert [charge.state for charge in ledger.charges("toy")] == ["settled"] * 3


_WAITING = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
)


@pytest.mark.postgres
def test_who_deletes_waits_for_who_writes(served: str) -> None:
    """It held the arms meanwhile, and each waited for the other until the server ended one of them."""
    study = Study.create(toy_spec(arms=[FIXED]), served)
    study.run()
    study.close()
    with closing(Life("toy", served)) as writing, closing(Life("toy", served)) as deleting:
        thread = threading.Thread(target=deleting.delete)
        with writing.writing() as connection:
            thread.start()
            while not connection.execute(_WAITING).scalar():
                pass
            changed = sa.update(arms).where(arms.c.study == "toy").values(announced=1)
            assert connection.execute(changed).rowcount > 0
        thread.join()
        assert StudyStore(writing.storage).uids() == {}
