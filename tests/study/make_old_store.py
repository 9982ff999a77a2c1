"""Makes ``old_store.zip``: studies as the version left them whose state was in Optuna's attributes.

Run once at commit 027e795, the last of that version: ``python -m tests.study.make_old_store``.
The study ``toy`` stopped in the middle of its sealed round; ``open`` has a released and a charged arm.
``expected.json`` holds what the same version released when it went on with a copy of the store.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import privtune
from privtune.strategies import Fixed
from privtune.study import Study, StudyInterruptedError, _round
from tests.study.conftest import toy_spec
from tests.toy import blobs

DATA = blobs().load()
LOOP = privtune.DPSGD(records=240, epochs=1, expected_batch_size=24)
ARCHIVE = Path(__file__).with_name("old_store.zip")


def objective(trial: privtune.Trial) -> float:
    """Train a linear model in a loop of one's own."""
    model = nn.Linear(6, 3)
    private = trial.make_private(model, torch.optim.SGD(model.parameters(), 0.5), DATA.train)
    for x, y in private.batches():
        private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
    return trial.score(model, DATA.validation)


def go_on(storage: str) -> dict[str, Any]:
    """Finish the study ``open``, and return what it released."""
    loop = Study("open", storage)
    loop.optimize(objective, strategy=Fixed(), training=LOOP, arm="second", epsilon=1.0)
    return {
        f"{loop.name}/{release.arm}": {
            "params": dict(release.params),
            "score": release.score,
            "weights": release.weights.tolist(),
        }
        for release in loop.releases()
    }


def main() -> None:
    """Make the studies, stop them, and pack them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "store")
        folder.mkdir()
        storage = f"sqlite:///{folder / 'privtune.db'}"
        toy = Study.create(toy_spec(seed=1, budget=_budget("toy"), epochs=1), storage)
        train, calls = _round.train_trials, []

        def stops(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:  # after the fixed arm and two rows of the round
                raise KeyboardInterrupt
            return train(*args, **options)

        _round.train_trials = stops
        with contextlib.suppress(KeyboardInterrupt):
            toy.run(stack=1)
        _round.train_trials = train
        toy.close()
        loop = privtune.create_study(
            "open", budget=privtune.Budget(3.0, 1e-5, name="open"), storage=storage, seed=2
        )
        common: dict[str, Any] = {"strategy": Fixed(), "training": LOOP, "epsilon": 1.0}
        loop.optimize(objective, arm="first", **common)
        with contextlib.suppress(StudyInterruptedError):
            loop.optimize(objective, arm="second", timeout=-1.0, **common)
        loop.close()
        copy = Path(name, "copy")
        shutil.copytree(folder, copy)
        expected = go_on(f"sqlite:///{copy / 'privtune.db'}")
        with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(folder))
            archive.writestr("expected.json", json.dumps(expected))


def _budget(name: str) -> dict[str, Any]:
    return {"name": name, "epsilon": 6.0, "delta": 1e-5}


if __name__ == "__main__":
    main()
