"""Pictures, texts and queries: from a file to a task, and what is refused."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from privtune.errors import PrivTuneError
from privtune.tables.listening import ON_READ
from privtune.tasks import TaskDataError, get_task
from tests.tasks.test_stages import people, table

SIZES = {"train": 80, "validation": 20, "test": 20}


def pictures(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 8, 6, 3), dtype=np.uint8), rng.integers(0, 3, count)


def images(path: Path, **changes: Any) -> dict[str, Any]:
    spec = {"type": "images", "path": str(path), "classes": [0, 1, 2], "shape": [3, 8, 6], **SIZES}
    return {**spec, **changes}


def everything(spec: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of all splits, in an order of their own."""
    data = get_task(spec).load()
    parts = (data.train, data.validation, data.test)
    x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
    order = np.lexsort(x.flatten(1).numpy().T)
    return x[order], y[order]


@pytest.mark.parametrize("layout", ["last", "first", "floats"])
def test_arrays_are_scaled_by_their_type(tmp_path: Path, layout: str) -> None:
    x, y = pictures()
    made = {"last": x, "first": x.transpose(0, 3, 1, 2), "floats": x / np.float32(255)}[layout]
    np.savez(tmp_path / "p.npz", x=made, y=y)
    found, labels = everything(images(tmp_path / "p.npz"))
    wanted = torch.from_numpy(x.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    order = np.lexsort(wanted.flatten(1).numpy().T)
    torch.testing.assert_close(found, wanted[order])
    assert torch.equal(labels, torch.from_numpy(y)[order])


def test_a_folder_gives_what_its_arrays_give_and_broken_pictures_nothing(tmp_path: Path) -> None:
    x, y = pictures()
    np.savez(tmp_path / "p.npz", x=x, y=y)
    for number, (picture, label) in enumerate(zip(x, y, strict=True)):
        folder = tmp_path / "p" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    whole = everything(images(tmp_path / "p.npz"))
    assert torch.equal(everything(images(tmp_path / "p"))[0], whole[0])
    (tmp_path / "p" / "1" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "p" / "notes.txt").write_text("no picture either")
    found, labels = everything(images(tmp_path / "p"))
    assert len(found) == len(x) + 1
    assert (labels == -1).sum() == 1
    assert found[labels == -1].abs().sum() == 0


@pytest.mark.parametrize("model", ["small-cnn", "resnet-gn"])
def test_networks_look_at_one_picture_at_a_time(model: str) -> None:
    network = get_task(images(Path("none.npz"), model=model)).model()
    x = torch.rand(4, 3, 8, 6)
    alone = torch.cat([network(picture) for picture in x.split(1)])
    torch.testing.assert_close(network(x), alone, rtol=1e-4, atol=1e-5)
    assert alone.shape == (4, 3)


def test_a_query_gives_what_its_table_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = people(500)
    frame.to_parquet("people.parquet")
    with sqlite3.connect("people.db") as connection:
        frame.to_sql("people", connection, index=False)
    connection.close()
    spec = table(Path("people.parquet"), columns={"age": [0, 100], "sex": {"categories": ["f"]}})
    del spec["class_weights"]
    asked = {k: v for k, v in spec.items() if k != "path"}
    asked |= {"url": "sqlite:///${NAME_OF_DB}", "query": "SELECT * FROM people WHERE age > 0;"}
    task = get_task(asked)
    with pytest.raises(TaskDataError, match="needs the variable NAME_OF_DB"):
        task.check()
    monkeypatch.setenv("NAME_OF_DB", "people.db")
    task.check()
    one, two = everything(spec), everything(asked)
    assert torch.equal(one[0], two[0])
    with pytest.raises(TaskDataError, match="lacks the declared columns height"):
        get_task({**asked, "columns": {"height": [0, 2]}}).check()
    with pytest.raises(TaskDataError, match="cannot be read") as caught:
        get_task({**asked, "query": "SELECT * FROM secrets"}).check()
    assert "secrets" not in str(caught.value)


class _Tokens:
    """A tokenizer of letters, in the place of Hugging Face's."""

    def __call__(
        self, texts: list[str], *, max_length: int, **_: object
    ) -> dict[str, torch.Tensor]:
        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        for row, said in enumerate(texts):
            cut = [ord(letter) % 50 + 1 for letter in said[:max_length]]
            ids[row, : len(cut)] = torch.tensor(cut, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=51,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_texts_become_features_of_their_own(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: _Tokens())
    said = [("good" if i % 2 else "bad", f"{i} words {i * i}") for i in range(90)]
    lines = [json.dumps({"label": label, "text": words}) for label, words in said]
    path = tmp_path / "texts.jsonl"
    path.write_text(
        "\n".join([*lines, '{"label": "good"}', "{broken", '{"label": "?", "text": "a"}'])
    )
    spec = {"type": "text", "path": str(path), "classes": ["bad", "good"], "length": 12}
    spec |= {"encoder": str(encoder), **SIZES}
    task = get_task(spec)
    assert task.input_shape == (8,)
    assert task.facts.to_dict()["pretrained weights"].startswith("encoder, SHA-256 ")
    task.check()
    shares: list[float] = []
    token = ON_READ.set(shares.append)
    x, y = everything(spec)
    ON_READ.reset(token)
    assert shares[-1] == 1.0
    assert len(x) == 93
    assert (y == -1).sum() == 3
    torch.testing.assert_close(x[y >= 0].norm(dim=1), torch.ones(90))
    # One text less moves no other, and changes no other's features.
    before = task.load()
    path.write_text("\n".join(lines[1:]))
    after = get_task(spec).load()
    lost = 0
    for split in ("train", "validation", "test"):
        one, two = (getattr(data, split) for data in (before, after))
        known = one.x[one.y >= 0]
        nearest = torch.cdist(two.x, known).amin(dim=1)
        assert nearest.max() < 1e-3
        lost += len(known) - len(two.x)
    assert lost == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK", "must be a folder of classes, or an .npz file"),
        ({"x": np.zeros((3, 8, 6, 3)), "y": np.zeros(2)}, "one class for each of x"),
    ],
)
def test_files_are_checked_before_the_charge(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "p.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(PrivTuneError) as caught:
        get_task(images(path)).check()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
