"""Imported before processes are forked that run studies: each then starts where this one ends."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import privtune
from privtune.study import Study
from tests.study import driven
from tests.study.conftest import PARAMETERS, toy_spec

with tempfile.TemporaryDirectory() as folder:
    arms = [
        {"name": "fixed", "strategy": "fixed", "parameters": PARAMETERS},
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
    ]
    url = f"sqlite:///{Path(folder) / 'privtune.db'}"
    with closing(Study.create(toy_spec(seed=2, epochs=1, arms=arms), url)) as study:
        study.run(stack=1)
    privtune.create_study("open", budget=driven.OPEN, storage=url).close()
    for arm in ("first", "selection"):  # the second is admitted by the filter
        driven.added(url, arm)
