"""A fact about an arm is laid out once, and then stands wherever arms are shown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from privtune.study import Study, arm_row
from privtune.study.arm_row import COLUMNS, ArmColumn, ArmRow
from privtune.views.comparison import comparison_document, table_of, to_csv, to_markdown
from privtune.views.record import arm_record, budget_view
from privtune.views.report import render_study
from tests.study.conftest import FIXED, toy_spec

EXTRA = ArmColumn(
    "carbon",
    lambda status: 12.5 if status.release is not None else None,
    title="carbon, g",
    show="{:.1f} g".format,
    metric="cost/carbon",
    tag="privtune.carbon",
    word="{:.1f} grams".format,
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    url = f"sqlite:///{tmp_path_factory.mktemp('rows') / 'privtune.db'}"
    selection = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4}
    with closing(Study.create(toy_spec(arms=[FIXED, selection], seed=5), url)) as study:
        study.run()
        yield study


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> tuple[ArmColumn, ...]:
    """All columns there are, and one more."""
    more = (*COLUMNS, EXTRA)
    monkeypatch.setattr(arm_row, "COLUMNS", more)
    return more


@pytest.mark.slow
def test_a_column_stands_in_every_sink(study: Study, columns: tuple[ArmColumn, ...]) -> None:
    """One entry is all that a new fact takes."""
    arms = study.status()
    document = comparison_document(study)["arms"][0]
    line = csv.DictReader(io.StringIO(to_csv(study))).__next__()
    frame = study.compare().reset_index()
    table = table_of(arms)[0]
    markdown = to_markdown(study).splitlines()
    page = render_study(study)
    record = arm_record(study, study.plans[0], study.release("defaults"), budget_view(study))
    row = ArmRow.of(arms[0])
    for column in columns:
        assert column.name in document
        assert column.name in line
        assert column.name in frame
        if column.title:
            assert column.title in table
            assert any(f"| {column.title} |" in text for text in markdown)
            assert re.search(rf"<th[^>]*>{re.escape(column.title)}</th>", page)
        if row.facts[column.name] is None:
            continue
        if column.tag:
            assert record.tags[column.tag] == column.word(row.facts[column.name])
        if column.metric:
            assert column.metric in {name for name, _, _ in record.points}
    assert (document["carbon"], line["carbon"], frame["carbon"][0]) == (12.5, "12.5", 12.5)
    assert table["carbon, g"] == "12.5 g"
    assert record.tags["privtune.carbon"] == "12.5 grams"
    assert ("cost/carbon", 12.5, 0) in record.points


@pytest.mark.slow
def test_a_frame_and_a_file_of_csv_have_the_same_columns(study: Study, tmp_path: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(study))))
    frame = study.compare().reset_index()
    assert set(frame.columns) == set(lines[0])
    assert list(frame["arm"]) == [line["arm"] for line in lines]
