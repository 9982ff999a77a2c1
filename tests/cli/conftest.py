from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from privtune.cli import _common, main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line as a user would, and return its exit code and what it printed."""

    def call(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["privtune", *args])
        monkeypatch.setattr(_common.console(), "_width", 200, raising=False)
        capsys.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return Done(int(code or 0), printed.out, printed.err)  # type: ignore[call-overload]

    return call
