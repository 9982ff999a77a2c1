"""``python -m privtune`` is the command line."""

from __future__ import annotations

import subprocess
import sys

from privtune import __version__


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "privtune", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__
