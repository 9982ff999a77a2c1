"""The examples of the documentation run, small."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name: str, storage_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    study = load_file(EXAMPLES / f"{name}.py").main(storage=storage_url, epochs=0.5)
    (status,) = study.status()
    assert status.state == "settled"
    assert study.spent().epsilon <= study.spec.budget.epsilon
    assert "ε" in capsys.readouterr().out
