"""Rounds on Ray and SLURM, as far as one machine shows them; skipped where those are not installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.launchers import STOPPED
from privtune.ledger import Ledger
from privtune.study import Study
from privtune.study.workers import assist
from tests.study.conftest import toy_spec
from tests.study.elsewhere import BREAK
from tests.tiers import ROOT

ARM = {"name": "arm", "strategy": "papernot-steinke", "mean_runs": 4}
SENTINEL = "sentinel-that-no-accident-writes-7c1f"


def make(url: str, **changes: object) -> Study:
    return Study.create(toy_spec(arms=[ARM], seed=4, **changes), url)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / SENTINEL / 'p.db'}"
    (tmp_path / SENTINEL).mkdir()
    monkeypatch.setenv("PRIVTUNE_STORAGE", url)
    return url


@pytest.fixture
def cluster(url: str) -> Iterator[Path]:
    ray = pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
    )
    yield folder
    ray.shutdown()
    shutil.rmtree(folder)


def written(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_socket())


@pytest.mark.slow
def test_ray_trains_a_round_and_is_told_two_names(url: str, cluster: Path, tmp_path: Path) -> None:
    expected = make(f"sqlite:///{tmp_path / 'inline.db'}").run()
    (release,) = make(url).run(executor={"type": "ray"}, n_jobs=2)
    assert release.params == expected[0].params
    with Ledger(url) as ledger:
        assert len(ledger.charges("toy")) == 1
    logs = written(cluster)
    assert logs, "Ray writes logs"
    assert SENTINEL.encode() not in logs, "where the storage is stands in no log"


@pytest.mark.slow
def test_what_no_node_can_hold_is_refused_before_ray_waits_for_ever(
    url: str, cluster: Path
) -> None:
    with pytest.raises(PrivTuneError, match="wait for ever"):
        make(url).run(executor={"type": "ray", "gpus": 64}, n_jobs=2)


@pytest.mark.slow
def test_workers_on_ray_look_for_no_module_in_the_folder(tmp_path: Path) -> None:
    """The command line's own cluster; workers stand in its folder, which is on no path."""
    ray = pytest.importorskip("ray")
    code = (
        "from privtune.execution.launchers import run_on_ray\n"
        "from privtune.imports import OWN_PROCESS\n"
        "from tests.execution.workers import place\n"
        "import pathlib\n"
        "OWN_PROCESS.set()\n"
        "left = lambda: int(not pathlib.Path('place.json').exists())\n"
        "run_on_ray(place, ('a', 'b'), jobs=1, gpus=0, open_count=left)\n"
    )
    places = [str(ROOT), str(Path(ray.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    environment |= {"RAY_AUTH_MODE": "token", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    folder, path = json.loads((tmp_path / "place.json").read_text())
    assert folder == str(tmp_path)
    assert not {"", folder} & set(path)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # submitit's own jobs
def test_slurm_trains_a_round(url: str, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    expected = make(f"sqlite:///{tmp_path / 'inline.db'}").run()
    study = make(url)
    (release,) = study.run(executor={"type": "slurm", "cluster": "local", "timeout_min": 5})
    assert release.params == expected[0].params
    other = make(f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(InvalidInputError, match="submitit says"):
        other.run(executor={"type": "slurm", "cluster": "local", "partitoin": "x"})


def test_a_task_of_a_scheduler_never_raises(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BREAK, "record 17 is odd")
    assert assist("nobody", "arm") == STOPPED
    monkeypatch.delenv("PRIVTUNE_STORAGE")
    assert assist("toy", "arm") == STOPPED
    note = tmp_path / "storage"
    note.write_text(url)
    monkeypatch.setenv("PRIVTUNE_STORAGE_FILE", str(note))
    make(url).close()
    note.chmod(0o644)
    assert assist("toy", "arm") == STOPPED, "others can read it"
    note.chmod(0o600)
    assert assist("toy", "arm") == 0, "there is nothing to do"
