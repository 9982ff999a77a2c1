"""Where the CPU time of a command goes: its stack is looked at every four milliseconds of it.

    OMP_NUM_THREADS=1 python studies/benchmarks/end_to_end/where.py study run digits-demo

Prints a table of shares. An import counts for the library that was asked for, whatever that imports in turn;
what is no import counts for the first of the list below that it happens in.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from types import FrameType

from privtune.cli import main

EVERY = (
    0.004  # seconds of CPU time; a long call into a library is seen once, and counts for its length
)
LIBRARIES = "site-packages/"
OWN = "privtune/"
# Parts of paths, and of functions in them: the first of these that is anywhere on the stack counts.
DOING = (
    ("execution/trial_training.py", "dry_run", "rehearsals"),
    ("training/engine/train.py", "of_group", "training"),
    ("accounting/rdp.py", "confirm_composition", "autodp's check"),
    ("ledger/admission.py", "", "composition of what is charged"),
    ("accounting/", "", "other answers of the accountant (ε by step)"),
    ("training/mechanism/scoring.py", "", "scores of candidates and models"),
    ("tracking/store.py", "open_client", "opening MLflow"),
    ("tracking/", "", "writing to MLflow"),
    ("study/trials.py", "", "Optuna's storage"),
    ("ledger/", "", "the ledger and the studies' tables"),
    ("study/rows.py", "", "the ledger and the studies' tables"),
    ("study/lifecycle.py", "", "the ledger and the studies' tables"),
    ("tasks/", "", "records: reading, splitting"),
)


def what(frame: FrameType | None) -> str:
    """Return what a stack is doing."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    frames.reverse()  # outermost first
    frames = [(path, name) for path, name in frames if path != __file__]
    for path, name in frames:
        if name == "<module>" and LIBRARIES in path:
            return f"import of {path.split(LIBRARIES)[1].split('/')[0].removesuffix('.py')}"
    if any(name == "<module>" and OWN in path for path, name in frames):
        return "import of privtune's own modules"
    for part, function, doing in DOING:
        if any(part in path and function in name for path, name in frames):
            return doing
    return "the rest (Typer and Rich among it)"


def watch() -> int:
    """Run a command of privtune, and print where its time went."""
    times: Counter[str] = Counter()
    last = time.process_time()

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.process_time()
        times[what(frame)] += now - last
        last = now

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    else:
        code = 0
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    total = sum(times.values())
    print(f"\n{total:.2f} s of CPU\n\n| what | CPU s | share |\n| --- | --- | --- |")
    for doing, spent in times.most_common():
        print(f"| {doing} | {spent:.2f} | {spent / total:.0%} |")
    return code


if __name__ == "__main__":
    raise SystemExit(watch())
