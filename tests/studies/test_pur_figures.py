"""A table of one's own: how it is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from studies.pur_figures.work import LARGEST, table

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("head", ["", "duration, service, bytes, label\n"])
def test_words_are_coded_and_what_is_not_normal_is_positive(head, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(head + "0, smtp, 5.5, normal.\n\n1, ftp, 7, smurf.\n2, http, 9, Normal\n")
    x, y = table(path)
    assert x.tolist() == [[0.0, 2.0, 5.5], [1.0, 0.0, 7.0], [2.0, 1.0, 9.0]]
    assert y.tolist() == [-1.0, 1.0, -1.0]


def test_a_long_table_is_sampled_without_replacement(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("".join(f"{k},normal.\n" for k in range(LARGEST + 50)))
    x, y = table(path)
    assert len(np.unique(x)) == len(x) == len(y) == LARGEST


@pytest.mark.parametrize("text", ["", "1,normal.\n1,2,normal.\n", "normal.\nsmurf.\n"])
def test_lines_of_other_lengths_are_refused(text, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="same columns"):
        table(path)
