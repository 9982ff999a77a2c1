"""What is said of all charges together is true of the number that it stands beside."""

from __future__ import annotations

from contextlib import closing

import pytest

from privtune.cli._tables import print_comparison
from privtune.study import Study
from privtune.views.record import budget_view, study_note
from privtune.views.report import render_study
from tests.study.conftest import toy_spec

PARAMETERS = {"learning_rate": 0.5, "max_grad_norm": 1.0}
COMPOSITION = "the composition of all charges, not their sum"


def test_a_composition_is_said_only_where_it_is_one(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str, storage: str, **more: float) -> tuple[str, str]:
        arms = [{"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}]
        url = f"sqlite:///{tmp_path}/{storage}.db"
        with closing(Study.create(toy_spec(name=name, arms=arms, **more), url)) as study:
            study.run()
            print_comparison(study)
            view = budget_view(study)
            page = render_study(study)
            texts = (capsys.readouterr().out, study_note(study, view), page)
            return view.spent.method, " ".join(" ".join(texts).split())

    # A study that takes the whole budget leaves no room: nothing can follow.
    method, whole = said("whole", "one")
    assert whole.count(f"by {method}: {COMPOSITION}") == 3
    # What follows may depend on what a first study has shown: the odometer reads, and the filter admits.
    for name in ("first", "second"):
        method, read = said(name, "two", epsilon=1.0)
        assert method in ("odometer", "filter")
        assert read.count(f"by the {method}: ") == 3
        assert "composition of all charges" not in read
