"""Film reviews, as vectors of a frozen encoder, for a small network: the kind of the paper's IMDB."""

from __future__ import annotations

from privtune.tasks import Sizes, Task
from studies.auto.tasks import Arrays, Made, texts_of

SENTENCES = Sizes(8_568, 1_000, 1_000)
LAYERS = (384, 32, 2)


def _reviews() -> Arrays:
    """Return sentences of film reviews as vectors, and whether readers had them as good."""
    x, labels = texts_of("reviews")
    return x, (labels == "good").astype(int)


def reviews() -> Task:
    """Return sentences of film reviews with a perceptron of 32 hidden units."""
    return Made(_reviews, SENTENCES, LAYERS, epochs=5, batch=128).task("reviews")
