"""A store of the version before: it is upgraded, and its studies go on to their releases."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

from privtune.errors import InvalidInputError
from privtune.ledger import Ledger, LedgerSchemaError, upgrade_storage, verify
from privtune.study import Study, study_names
from tests.study.make_old_store import ARCHIVE, go_on


def test_studies_of_the_version_before_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text())
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    with pytest.raises(LedgerSchemaError, match="privtune budget upgrade"):
        Study("toy", storage)
    upgrade_storage(storage)
    with closing(sqlite3.connect(tmp_path / "privtune.db")) as database:
        count = "SELECT count(*) FROM study_user_attributes WHERE key LIKE 'privtune:%'"
        assert database.execute(count).fetchone() == (0,), "secrets have one home"
    assert study_names(storage) == ["open", "toy"]
    # HyFreeDP's fits of that version are gone, and so is what its plan stands for.
    with pytest.raises(
        InvalidInputError, match=r"stored plan of hyfreedp.*are not in this version"
    ):
        Study("toy", storage).status()
    assert [s.state for s in Study("open", storage).status()] == ["settled", "started"]

    monkeypatch.chdir(tmp_path.parent)
    released = go_on(storage)
    assert released.keys() == {name for name in expected if name.startswith("open/")}
    for name in ("open/first",):
        assert released[name]["params"] == expected[name]["params"]
        weights, before = (torch.tensor(r[name]["weights"]) for r in (released, expected))
        assert released[name]["score"] == pytest.approx(expected[name]["score"], abs=1e-6)
        assert torch.allclose(weights, before, atol=1e-5), name
    with Ledger(storage) as ledger:
        assert [c.state for c in ledger.charges("open")] == ["settled"] * 2
        for budget in ("toy", "open"):
            verify(ledger.log.storage, budget)
