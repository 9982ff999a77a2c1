"""The table of audits: one line each, on ``pytest -s``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from privtune.audit.bounds import LowerBound


def note(mechanism: str, audit: Callable[[], LowerBound], reported: float) -> LowerBound:
    """Run an audit and write its line: mechanism, audited, reported, ratio, runs, CPU seconds."""
    started = time.process_time()
    found = audit()
    seconds = time.process_time() - started
    sys.stdout.write(
        f"{mechanism:40} {found.epsilon:6.2f} {reported:6.2f} {found.epsilon / reported:5.2f} "
        f"{found.runs:7d} {seconds:6.1f}\n"
    )
    return found
