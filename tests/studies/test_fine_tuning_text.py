"""The study of texts: labels and texts of one's own are read as they are declared."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from studies.fine_tuning_text import task


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_label_of_no_class_counts_as_nothing(tmp_path, monkeypatch, suffix):
    lines = [{"t": "the film was great", "l": "good"}, {"t": "the meal was dull", "l": "bad"}]
    lines += [{"t": f"we liked it {n}", "l": "else"} for n in range(8)]
    path = tmp_path / f"texts.{suffix}"
    with path.open("w", newline="", encoding="utf-8") as file:
        if suffix == "csv":
            writer = csv.DictWriter(file, ["t", "l"])
            writer.writeheader()
            writer.writerows(lines)
        else:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    task.tiny_encoder(tmp_path / "encoder")
    given = {
        "texts": path.name,  # beside the file that names it
        "text": "t",
        "label": "l",
        "classes": ["bad", "good"],
        "sizes": [8, 1, 1],
        "public_test": True,
        "encoder": str(tmp_path / "encoder"),
        "length": 12,
    }
    (tmp_path / "own.json").write_text(json.dumps(given), encoding="utf-8")
    monkeypatch.setenv(task.SETTINGS, str(tmp_path / "own.json"))
    texts = task.texts()
    data = texts.load_checked()
    parts = [data.train, data.validation, data.test]
    y = np.concatenate([part.y.numpy()[~_lost(part)] for part in parts])
    assert sorted(y.tolist()) == [-1] * 8 + [0, 1]
    assert all(int(part.x.max()) < texts.tokens for part in parts)


def _lost(part):
    unusable = part.unusable
    return np.zeros(len(part), bool) if unusable is None else unusable.numpy()
