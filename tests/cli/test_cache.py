"""No command keeps a number for another one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import yaml

from privtune.study import Study
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec

SHOWN = (
    ("study", "show", "toy"),
    ("study", "compare", "toy"),
    ("budget", "show", "toy"),
    ("budget", "list"),
    ("budget", "charges", "toy"),
)


def test_nothing_that_commands_show_or_plan_is_kept(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, storage = tmp_path / "cache", f"sqlite:///{tmp_path / 'privtune.db'}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    arms = toy_spec().model_dump(mode="json")["arms"][:2]
    spec = toy_spec(noise="plain", arms=arms, epochs=1)
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    with closing(Study.create(spec, storage)) as study:
        study.run()
    for command in SHOWN:
        assert cli(*command, "--storage", storage, "--json").code == 0, command
    page = tmp_path / "page.html"
    assert cli("study", "compare", "toy", "--storage", storage, "--html", str(page)).code == 0
    assert cli("study", "plan", str(file), "--json").code == 0
    assert [path.name for path in cache.rglob("*") if path.is_file()] == []
