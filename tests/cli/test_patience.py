"""A command that takes long says on stderr what it is doing; one that does not says nothing."""

from __future__ import annotations

import time

import pytest

from privtune.cli._common import patience


def test_what_takes_long_is_told_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with patience("Planning", after=0.01):
        time.sleep(0.2)
    with patience("Nothing", after=30.0):
        pass
    assert capsys.readouterr() == ("", "Planning ...\n")
