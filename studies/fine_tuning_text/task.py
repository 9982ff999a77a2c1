"""Labelled texts, read by an encoder of Hugging Face; or generated sentences and a tiny encoder."""

from __future__ import annotations

import atexit
import csv
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from privtune.tasks import Sizes, Task, TaskData, split
from studies.harness import cross_entropy

SETTINGS = "PRIVTUNE_DATA"
"""The environment variable with the path of a JSON file that says which texts: workers read it, too."""

SUBJECTS = ("film", "meal", "room", "trip", "phone", "book", "song", "game")
GOOD = ("lovely", "great", "fine", "superb", "warm", "clever", "honest", "bright")
BAD = ("awful", "poor", "dull", "broken", "cold", "stupid", "false", "grim")
ALL = ("the", "was", "not", "very", "rather", "and", "we", "liked", "it", "once", "again", "today")


def generate(path: Path, sentences: int = 4_000, seed: int = 0) -> None:
    """Write sentences of two moods: a word says the mood, and "not" turns it round."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(sentences):
            good, turned = rng.integers(2, size=2)
            word = rng.choice(GOOD if good else BAD)
            degree = rng.choice(["not", "not very"] if turned else ["very", "rather", "once"])
            tail = rng.choice(["today", "again", "and we liked it", "once"])
            text = f"the {rng.choice(SUBJECTS)} was {degree} {word} {tail}"
            line = {"text": text, "label": ["bad", "good"][int(good != turned)]}
            file.write(json.dumps(line) + "\n")


def tiny_encoder(folder: Path, seed: int = 0) -> None:
    """Save a BERT of two layers with drawn weights, and a tokenizer of the generated words."""
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SUBJECTS, *GOOD, *BAD, *ALL]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    BertTokenizer(vocab={word: n for n, word in enumerate(words)}).save_pretrained(folder)


class Classifier(nn.Module):
    """A head on the mean of an encoder's states over the tokens that are there."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = x != 0
        states = self.encoder(input_ids=x, attention_mask=there.long()).last_hidden_state
        weights = there.unsqueeze(-1) / there.sum(1).clamp(min=1)[:, None, None]
        return self.head((states * weights).sum(1))


@functools.cache
def generated() -> Path:
    """Write generated sentences and a tiny encoder, once a run; return the file that says so."""
    folder = _folder()
    generate(folder / "texts.jsonl")
    tiny_encoder(folder / "encoder")
    told = {"texts": "texts.jsonl", "encoder": "encoder", "classes": ["bad", "good"], "length": 12}
    told |= {"sizes": [3000, 500, 500], "public_test": True}
    (folder / "texts.json").write_text(json.dumps(told), encoding="utf-8")
    return folder / "texts.json"


def settings() -> dict[str, Any]:
    """Return what the file says; its paths are relative to it."""
    path = Path(os.environ[SETTINGS])
    given = {"text": "text", "label": "label", "public_test": False, "length": 64}
    given |= json.loads(path.read_text("utf-8"))
    return given | {name: path.parent / given[name] for name in ("texts", "encoder")}


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _network() -> nn.Module:
    from transformers import AutoConfig, AutoModel

    given = settings()
    config = AutoConfig.from_pretrained(given["encoder"], local_files_only=True)
    encoder = AutoModel.from_config(config)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # its outputs are not used, so it must not be trained
    # Evaluation: dropout has nothing to say in a few steps of fine-tuning under noise.
    return Classifier(encoder, config.hidden_size, len(given["classes"])).eval()


def public_weights() -> Path:
    """Return a file of the encoder's weights under the names that they have in ``Classifier``."""
    return _renamed(settings()["encoder"])


@functools.cache
def _renamed(encoder: Path) -> Path:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(encoder.glob("*.safetensors")):
        found |= load_file(file)
    bodies = {n.removeprefix("bert."): t for n, t in found.items()}
    path = _folder() / "encoder.safetensors"
    save_file({f"encoder.{n}": t.contiguous() for n, t in bodies.items()}, path)
    return path


def read(path: Path, text: str, label: str) -> tuple[list[str], list[str]]:
    """Read the texts and labels of a CSV file or of JSON lines."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file))
    return [str(row.get(text) or "") for row in rows], [str(row.get(label)) for row in rows]


def _load() -> TaskData:
    from transformers import AutoTokenizer

    given = settings()
    texts, labels = read(given["texts"], given["text"], given["label"])
    tokenizer = AutoTokenizer.from_pretrained(given["encoder"], local_files_only=True)
    # All to one length: what a text becomes must not hang on its neighbours' lengths.
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=given["length"])[
        "input_ids"
    ]
    classes = {name: n for n, name in enumerate(given["classes"])}
    y = np.array([classes.get(label, -1) for label in labels])  # another label counts as nothing
    ids = [f"{t}\0{label}" for t, label in zip(texts, labels, strict=True)]
    data = split(np.array(tokens), y, Sizes(*given["sizes"]), ids=ids)
    parts = (data.train, data.validation, data.test)
    return TaskData(*(dataclasses.replace(part, x=part.x.long()) for part in parts))


def texts() -> Task:
    """Return the task; the file that ``PRIVTUNE_DATA`` names says of what."""
    from transformers import AutoConfig

    given = settings()
    train, validation, test = given["sizes"]
    config = AutoConfig.from_pretrained(given["encoder"], local_files_only=True)
    return Task(
        name="texts",
        description="labelled texts",
        train_records=train,
        validation_records=validation,
        test_records=test,
        input_shape=(given["length"],),
        tokens=config.vocab_size,
        classes=len(given["classes"]),
        class_names=tuple(given["classes"]),
        load=_load,
        model=_network,
        loss=cross_entropy,
        public_test=given["public_test"],
        partition="content",
    )
