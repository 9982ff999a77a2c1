"""The study's tasks: tables of scikit-learn and statsmodels, generated records, MNIST made smaller, texts.

Features are scaled to [-1, 1] by round public bounds of the measured quantities, or of the generator.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import datasets
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn import functional as F

from privtune.tasks import Sizes, Task, split
from privtune.training.mechanism.schedule import Schedule
from studies.harness import cross_entropy, mnist

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
_SMALLER = 2  # side of the squares of pixels that become one


@dataclass(frozen=True)
class Made:
    """One task: its records, the widths of its network's layers, and how it is trained.

    Args:
        load: Returns inputs in [-1, 1] and class numbers.
        sizes: Expected records of each split.
        layers: Features, hidden ReLU units, classes; without hidden ones it starts from zero weights.
        epochs, batch: Of one training, the batch being the expected one.
        scale: Root mean square of a feature as far as it is known without the records.
    """

    load: Callable[[], Arrays]
    sizes: Sizes
    layers: tuple[int, ...]
    epochs: int
    batch: int
    scale: float = 0.5

    def task(self, name: str) -> Task:
        """Return the task, whose test records are public. Reads nothing."""
        return Task(
            name=name,
            description=f"a network {'-'.join(map(str, self.layers))}",
            **self.sizes.declared(),
            input_shape=self.layers[:1],
            classes=self.layers[-1],
            load=lambda: split(*self.records(), self.sizes),
            model=partial(network, self.layers),
            loss=cross_entropy,
            public_test=True,
            benchmark=True,
            partition="content",
        )

    def records(self) -> Arrays:
        """Return what ``load`` does on any number of cores.

        The last digits of a product of matrices depend on how many there are, and splits on those digits.
        """
        with threadpool_limits(1):
            return self.load()

    @property
    def weights(self) -> int:
        """Number of the network's weights."""
        return sum((one + 1) * two for one, two in itertools.pairwise(self.layers))

    @property
    def steps(self) -> int:
        """Steps of one training."""
        return Schedule.from_epochs(
            records=self.sizes.train, expected_batch_size=self.batch, epochs=self.epochs
        ).steps

    @property
    def terms(self) -> dict[str, Any]:
        """What a spec says of a training."""
        return {"epochs": self.epochs, "expected_batch_size": self.batch}


def network(layers: tuple[int, ...]) -> nn.Module:
    """Return a perceptron; one without hidden units starts from zero weights."""
    made: list[nn.Module] = []
    for one, two in itertools.pairwise(layers):
        made += [nn.Linear(one, two), nn.ReLU()]
    if len(layers) == 2:
        nn.init.zeros_(made[0].weight)
        nn.init.zeros_(made[0].bias)
    return nn.Sequential(*made[:-1])


def between(x: Any, low: Any, high: Any) -> npt.NDArray[Any]:
    """Return numbers between two bounds as numbers in [-1, 1]."""
    low, high = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
    return 2.0 * (np.clip(x, low, high) - low) / (high - low) - 1.0


def _generated(name: str, low: float, high: float, **how: Any) -> Arrays:
    x, y = getattr(datasets, name)(**how)
    return between(x, low, high), (np.asarray(y) > 0 if np.min(y) < 0 else np.asarray(y)).astype(
        int
    )


def _classes(records: int, features: int, classes: int, seed: int) -> Callable[[], Arrays]:
    """Return a loader of normal clusters about the corners of a cube, a fifth of the features noise."""
    informative = features // 2
    how = {
        "n_samples": records,
        "n_features": features,
        "n_informative": informative,
        "n_redundant": features - informative - features // 5,
        "n_classes": classes,
        "n_clusters_per_class": 2,
        "random_state": seed,
    }
    return partial(_generated, "make_classification", -6.0, 6.0, **how)


def _cancer() -> Arrays:
    measured = (40, 50, 260, 4500, 0.25, 1.2, 1.4, 0.4, 0.8, 0.3)
    errors = (4, 6, 25, 600, 0.04, 0.2, 0.5, 0.08, 0.1, 0.04)
    high = (*measured, *errors, *measured)
    x, y = datasets.load_breast_cancer(return_X_y=True)
    return between(x, 0.0, high), y


def _diabetes() -> Arrays:
    """Whether the disease's progression is above 140."""
    low = (0, 1, 10, 40, 50, 0, 0, 0, 2, 40)
    high = (100, 2, 50, 160, 350, 250, 120, 10, 7, 150)
    x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    return between(x, low, high), (y > 140).astype(int)


def _wine() -> Arrays:
    low = (10, 0, 1, 5, 50, 0, 0, 0, 0, 0, 0, 1, 200)
    high = (16, 8, 4, 40, 200, 5, 6, 1, 5, 15, 2, 5, 2000)
    x, y = datasets.load_wine(return_X_y=True)
    return between(x, low, high), y


def of_statsmodels(name: str) -> Any:
    import statsmodels.api

    return getattr(statsmodels.api.datasets, name).load_pandas().data


def _fair() -> Arrays:
    """Whether a woman of Redbook's survey of 1974 reports an affair."""
    data = of_statsmodels("fair")
    x = data.drop(columns="affairs").to_numpy()
    low, high = (1, 15, 0, 0, 1, 8, 1, 1), (5, 50, 30, 6, 4, 20, 6, 6)
    return between(x, low, high), (data["affairs"] > 0).to_numpy().astype(int)


def _randhie() -> Arrays:
    """Whether a person of RAND's Health Insurance Experiment saw a doctor in a year."""
    data = of_statsmodels("randhie")
    x = data.drop(columns="mdvis").to_numpy()
    high = (5, 1, 8, 9, 1, 60, 1, 1, 1)
    return between(x, 0.0, high), (data["mdvis"] > 0).to_numpy().astype(int)


def _anes() -> Arrays:
    """Whether a voter of 1996 said Dole."""
    data = of_statsmodels("anes96")
    columns = ["TVnews", "selfLR", "ClinLR", "DoleLR", "age", "educ", "income", "logpopul"]
    low, high = (0, 1, 1, 1, 18, 1, 1, -3), (7, 7, 7, 7, 95, 7, 24, 9)
    return between(data[columns].to_numpy(), low, high), data["vote"].to_numpy().astype(int)


def pictures(
    first: int, *, turned: bool = False, parity: bool = False, noise: float = 0.0
) -> Arrays:
    """Return 10,000 pictures of MNIST, 14 x 14: turned by random right angles, even and odd, or noisy."""
    whole = mnist(Path(os.environ.get("PRIVTUNE_DATA", "")), smoke=False)
    chosen = slice(first, first + 10_000)
    x = F.avg_pool2d(whole.x[chosen].view(-1, 1, 28, 28), _SMALLER)[:, 0].numpy()
    y = whole.y[chosen].numpy()
    if turned:
        turns = np.random.default_rng(0).integers(4, size=len(x))
        x = np.stack([np.rot90(one, turn) for one, turn in zip(x, turns, strict=True)])
    x = np.clip(x + noise * np.random.default_rng(1).standard_normal(x.shape), 0.0, 1.0)
    return 2.0 * x.reshape(len(x), -1) - 1.0, (y % 2 if parity else y)


def _choice() -> Arrays:
    """Whether a traveller between Sydney and Melbourne took this way of travelling."""
    data = of_statsmodels("modechoice")
    ways = (data["mode"].to_numpy()[:, None] == np.arange(1, 5)).astype(float)
    x = data[["ttme", "invc", "invt", "gc", "hinc", "psize"]].to_numpy()
    x = between(x, (0, 0, 0, 0, 0, 1), (100, 200, 1500, 300, 80, 6))
    return np.hstack([x, 2.0 * ways - 1.0]), data["choice"].to_numpy().astype(int)


def _schools() -> Arrays:
    """Whether half of a Californian district's pupils are above the nation's median in mathematics."""
    data = of_statsmodels("star98").iloc[:, :14]
    low, high = (*(0,) * 5, 5, 30, 2, 10, *(0,) * 3), (*(100,) * 5, 25, 90, 8, 30, *(100,) * 3)
    above = data["NABOVE"].to_numpy() > data["NBELOW"].to_numpy()
    return between(data.iloc[:, 2:].to_numpy(), low, high), above.astype(int)


def _halves() -> Arrays:
    """Whether a digit of scikit-learn's is above 4."""
    x, y = datasets.load_digits(return_X_y=True)
    return between(x, 0.0, 16.0), (y > 4).astype(int)


def _cut(name: str, low: Any, high: Any, cuts: Sequence[float], **how: Any) -> Arrays:
    """Return a generated regression's features, and between which cuts its target lies."""
    x, y = getattr(datasets, name)(**how)
    return between(x, low, high), np.digitize(y, cuts)


def texts_of(corpus: str) -> Arrays:
    """Return texts as a frozen MiniLM's vectors of length 1, and the names of their classes."""
    place = Path(os.environ.get("PRIVTUNE_DATA", "")).with_name(f"{corpus}.npz")
    with np.load(place) as file:
        return file["x_train"], file["classes"][file["y_train"]]


def _news(*, topics: bool = False) -> Arrays:
    """Return texts of twenty newsgroups, by group or by topic."""
    x, groups = texts_of("newsgroups")
    names = [group.split(".")[0] for group in groups] if topics else groups  # comp, rec, sci, ...
    return x, np.unique(names, return_inverse=True)[1]


def _earnings() -> Arrays:
    """Return Reuters' reports, and whether they are of earnings."""
    x, subjects = texts_of("minilm")
    return x, (subjects == "earn").astype(int)


def _of_length_1(load: Callable[[], Arrays]) -> Arrays:
    x, y = load()
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


def _patches() -> Arrays:
    """Return squares of 8 x 8 grey pixels of scikit-learn's two photographs, and of which they are."""
    parts = []
    for picture in datasets.load_sample_images().images:
        grey = picture.mean(axis=2) / 127.5 - 1.0
        high, wide = grey.shape[0] // 8, grey.shape[1] // 8
        squares = grey[: 8 * high, : 8 * wide].reshape(high, 8, wide, 8).swapaxes(1, 2)
        parts.append(squares.reshape(-1, 64))
    return np.concatenate(parts), np.repeat((0, 1), [len(part) for part in parts])


def _countries() -> Arrays:
    """Return the continent of plotly's countries by year, lifetime, and logarithms of people and income."""
    from plotly import data

    table = data.gapminder(return_type="pandas")
    columns = [
        table["year"],
        table["lifeExp"],
        np.log10(table["pop"]),
        np.log10(table["gdpPercap"]),
    ]
    x = between(np.stack(columns, axis=1), (1950, 20, 4, 2), (2010, 90, 10, 5.5))
    return x, np.unique(table["continent"], return_inverse=True)[1]


def _sunspots() -> Arrays:
    """Whether a year has more sunspots than the year before, by the nine years before."""
    every = of_statsmodels("sunspots")["SUNACTIVITY"].to_numpy()
    seen = np.lib.stride_tricks.sliding_window_view(every, 9)[:-1]
    return between(seen, 0.0, 200.0), (every[9:] > every[8:-1]).astype(int)


def _signs() -> Arrays:
    """Whether the first two of six normal numbers have one sign."""
    x = np.random.default_rng(18).standard_normal((10_000, 6))
    return between(x, -3.0, 3.0), (x[:, 0] * x[:, 1] > 0).astype(int)


def _weeks() -> Arrays:
    """Whether carbon dioxide over Mauna Loa rises in a week, by how it changed in the eight before."""
    every = np.diff(of_statsmodels("co2")["co2"].interpolate().to_numpy())
    seen = np.lib.stride_tricks.sliding_window_view(every, 8)[:-1]
    return between(seen, -2.0, 2.0), (every[8:] > 0).astype(int)


def _devout() -> Arrays:
    """How religious a woman of Redbook's survey of 1974 is, of four answers."""
    data = of_statsmodels("fair")
    x = data.drop(columns="religious").to_numpy()
    low, high = (1, 15, 0, 0, 8, 1, 1, 0), (5, 50, 30, 6, 20, 6, 6, 10)
    return between(x, low, high), data["religious"].to_numpy().astype(int) - 1


def _rings() -> Arrays:
    """Return points about three circles of one centre, and five numbers that say nothing."""
    draw = np.random.default_rng(20)
    ring, angle = draw.integers(3, size=8_000), 2.0 * np.pi * draw.random(8_000)
    radius = 1.0 + ring + 0.25 * draw.standard_normal(8_000)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return between(np.hstack([points, draw.standard_normal((8_000, 5))]), -4.0, 4.0), ring


def _changed(first: int, how: str) -> Arrays:
    """Return pictures of MNIST, 14 x 14, changed: see the cases."""
    x, y = pictures(first)
    if how == "loops":  # whether the digit has one
        return x, np.isin(y, (0, 6, 8, 9)).astype(int)
    if how == "coarse":  # 7 x 7 pixels
        return x.reshape(-1, 7, 2, 7, 2).mean(axis=(2, 4)).reshape(len(x), -1), y
    if how == "shifted":  # by up to three pixels either way
        moves = np.random.default_rng(3).integers(-3, 4, size=(len(x), 2))
        squares = x.reshape(-1, 14, 14)
        moved = [np.roll(one, move, axis=(0, 1)) for one, move in zip(squares, moves, strict=True)]
        return np.stack(moved).reshape(len(x), -1), y
    if how == "inverted":  # dark on white paper
        return -x, y
    if how == "half":  # the upper or the lower half is blank
        squares = x.reshape(-1, 14, 14).copy()
        blank = np.random.default_rng(2).integers(2, size=len(x))
        squares[blank == 0, :7], squares[blank == 1, 7:] = -1.0, -1.0
        return squares.reshape(len(x), -1), y
    # Two pictures, and whether their digits add up to ten or more.
    one, two = np.split(np.arange(len(x)), 2)
    return np.hstack([x[one], x[two]]), (y[one] + y[two] > 9).astype(int)


DEVELOPMENT: dict[str, Made] = {
    "classes-3k": Made(_classes(3_000, 30, 5, 1), Sizes(2_000, 500, 500), (30, 5), 10, 64),
    "circles": Made(
        partial(
            _generated, "make_circles", -1.5, 1.5, n_samples=3_000, noise=0.1, factor=0.5, random_state=2
        ),
        Sizes(2_000, 500, 500), (2, 32, 2), 20, 128,
    ),
    "hastie": Made(
        partial(_generated, "make_hastie_10_2", -3.0, 3.0, n_samples=10_000, random_state=3),
        Sizes(8_000, 1_000, 1_000), (10, 32, 2), 5, 128,
    ),
    "classes-40k": Made(_classes(40_000, 20, 4, 4), Sizes(32_000, 4_000, 4_000), (20, 4), 3, 512),
}  # fmt: skip
# Added when the first rule had missed its target on the first set: few records.
DEVELOPMENT |= {
    "small": Made(_classes(500, 20, 2, 10), Sizes(300, 100, 100), (20, 2), 20, 64),
    "small net": Made(_classes(500, 20, 2, 11), Sizes(300, 100, 100), (20, 32, 2), 20, 64),
    "net-1k": Made(_classes(2_000, 20, 3, 12), Sizes(1_000, 500, 500), (20, 32, 3), 20, 64),
}  # fmt: skip
FIRST: dict[str, Made] = {
    "cancer": Made(_cancer, Sizes(341, 114, 114), (30, 32, 2), 20, 64),
    "diabetes": Made(_diabetes, Sizes(265, 88, 89), (10, 2), 20, 64),
    "fair": Made(_fair, Sizes(4_400, 966, 1_000), (8, 2), 5, 128),
    "randhie": Made(_randhie, Sizes(14_000, 3_000, 3_190), (9, 32, 2), 3, 256),
    "moons": Made(
        partial(_generated, "make_moons", -2.5, 2.5, n_samples=5_000, noise=0.2, random_state=5),
        Sizes(3_000, 1_000, 1_000), (2, 32, 2), 20, 128,
    ),
    "classes-50k": Made(
        _classes(50_000, 20, 4, 6), Sizes(40_000, 5_000, 5_000), (20, 64, 4), 3, 512
    ),
    "even or odd": Made(
        partial(pictures, 0, parity=True), Sizes(8_000, 1_000, 1_000), (196, 2), 5, 128
    ),
}  # fmt: skip
SECOND: dict[str, Made] = {
    "wine": Made(_wine, Sizes(107, 35, 36), (13, 3), 20, 32),
    "anes96": Made(_anes, Sizes(566, 189, 189), (8, 2), 20, 64),
    "classes-2k": Made(_classes(2_000, 50, 3, 7), Sizes(1_200, 400, 400), (50, 3), 10, 64),
    "classes-30k": Made(_classes(35_000, 40, 10, 8), Sizes(28_000, 3_500, 3_500), (40, 10), 3, 512),
    "quantiles": Made(
        partial(
            _generated, "make_gaussian_quantiles", -3.0, 3.0,
            n_samples=8_000, n_features=10, n_classes=3, random_state=9,
        ),
        Sizes(6_000, 1_000, 1_000), (10, 64, 3), 10, 128,
    ),
    "turned": Made(
        partial(pictures, 10_000, turned=True), Sizes(8_000, 1_000, 1_000), (196, 64, 10), 5, 128
    ),
}  # fmt: skip
THIRD: dict[str, Made] = {
    "choice": Made(_choice, Sizes(540, 150, 150), (10, 2), 20, 64),
    "schools": Made(_schools, Sizes(183, 60, 60), (12, 16, 2), 20, 64),
    "halves": Made(_halves, Sizes(1_077, 360, 360), (64, 32, 2), 20, 64),
    "blobs": Made(
        partial(
            _generated, "make_blobs", -15.0, 15.0,
            n_samples=4_000, n_features=8, centers=6, cluster_std=4.0, random_state=13,
        ),
        Sizes(3_000, 500, 500), (8, 6), 10, 128,
    ),
    "friedman": Made(
        partial(
            _cut, "make_friedman1", 0.0, 1.0, (14.4,),
            n_samples=3_000, n_features=10, noise=1.0, random_state=14,
        ),
        Sizes(2_000, 500, 500), (10, 32, 2), 10, 64,
    ),
    "roll": Made(
        partial(
            _cut, "make_swiss_roll", -15.0, 22.0, (7.0, 9.4, 11.8),
            n_samples=12_000, noise=0.5, random_state=15,
        ),
        Sizes(10_000, 1_000, 1_000), (3, 64, 4), 5, 256,
    ),
    "sparse": Made(
        partial(_cut, "make_sparse_uncorrelated", -4.0, 4.0, (0.0,), n_samples=22_000, random_state=16),
        Sizes(20_000, 1_000, 1_000), (10, 2), 3, 256,
    ),
    "noisy": Made(
        partial(pictures, 20_000, noise=0.4), Sizes(8_000, 1_000, 1_000), (196, 64, 10), 5, 128
    ),
    "news": Made(_news, Sizes(2_584, 500, 500), (384, 20), 10, 128),
}  # fmt: skip
FOURTH: dict[str, Made] = {
    "patches": Made(_patches, Sizes(6_400, 1_000, 1_080), (64, 32, 2), 10, 128),
    "countries": Made(_countries, Sizes(1_200, 250, 254), (4, 32, 5), 20, 64),
    "sunspots": Made(_sunspots, Sizes(180, 60, 60), (9, 2), 20, 32),
    "curve": Made(
        partial(
            _cut, "make_s_curve", -1.5, 2.5, (-2.4, 0.0, 2.4),
            n_samples=6_000, noise=0.2, random_state=17,
        ),
        Sizes(4_000, 1_000, 1_000), (3, 32, 4), 10, 128,
    ),
    "signs": Made(_signs, Sizes(8_000, 1_000, 1_000), (6, 32, 2), 10, 128),
    "many": Made(_classes(10_000, 100, 8, 19), Sizes(8_000, 1_000, 1_000), (100, 96, 8), 5, 128),
    "inverted": Made(
        partial(_changed, 30_000, "inverted"), Sizes(8_000, 1_000, 1_000), (196, 64, 10), 5, 128
    ),
    "half": Made(
        partial(_changed, 40_000, "half"), Sizes(8_000, 1_000, 1_000), (196, 32, 10), 10, 256
    ),
    "sums": Made(partial(_changed, 50_000, "sums"), Sizes(4_000, 500, 500), (392, 64, 2), 10, 64),
    "topics": Made(
        partial(_news, topics=True), Sizes(2_584, 500, 500), (384, 64, 7), 10, 64, 384**-0.5
    ),
}  # fmt: skip
FIFTH: dict[str, Made] = {
    "earnings": Made(_earnings, Sizes(2_584, 500, 500), (384, 32, 2), 10, 64, 384**-0.5),
    "directions": Made(
        partial(_of_length_1, _classes(9_000, 120, 6, 21)),
        Sizes(7_000, 1_000, 1_000), (120, 48, 6), 10, 128, 120**-0.5,
    ),
    "weeks": Made(_weeks, Sizes(1_575, 350, 350), (8, 32, 2), 20, 64),
    "devout": Made(_devout, Sizes(4_400, 966, 1_000), (8, 32, 4), 10, 128),
    "loops": Made(
        partial(_changed, 0, "loops"), Sizes(8_000, 1_000, 1_000), (196, 48, 2), 5, 64
    ),
    "coarse": Made(
        partial(_changed, 10_000, "coarse"), Sizes(8_000, 1_000, 1_000), (49, 64, 10), 5, 128
    ),
    "shifted": Made(
        partial(_changed, 20_000, "shifted"), Sizes(8_000, 1_000, 1_000), (196, 96, 10), 10, 256
    ),
    "rings": Made(_rings, Sizes(6_000, 1_000, 1_000), (7, 64, 3), 10, 128),
    "currents": Made(
        partial(
            _cut, "make_friedman3", (0, 40 * np.pi, 0, 1), (100, 560 * np.pi, 1, 11), (1.2, 1.45),
            n_samples=4_000, noise=0.1, random_state=22,
        ),
        Sizes(3_000, 500, 500), (4, 32, 3), 10, 64,
    ),
    "clusters": Made(
        partial(
            _generated, "make_classification", -6.0, 6.0,
            n_samples=14_000, n_features=12, n_informative=8, n_redundant=2, n_clusters_per_class=8,
            random_state=23,
        ),
        Sizes(12_000, 1_000, 1_000), (12, 128, 2), 10, 128,
    ),
    "rare": Made(
        partial(
            _generated, "make_classification", -6.0, 6.0,
            n_samples=4_000, n_features=30, n_informative=10, weights=(0.8,), random_state=24,
        ),
        Sizes(3_000, 500, 500), (30, 2), 10, 64,
    ),
}  # fmt: skip
GENERATED: dict[str, Made] = {  # networks, for the spread of HyFreeDP's rates
    f"net {records}-{features}-{classes}": Made(
        (
            partial(
                _generated, "make_gaussian_quantiles", -3.0, 3.0,
                n_samples=records + 1_000, n_features=6, n_classes=classes, random_state=100 + n,
            )
            if features == 6
            else _classes(records + 1_000, features, classes, 100 + n)
        ),
        Sizes(records, 200, 800), (features, hidden, classes), 10 + 10 * (n % 3 > 0),
        32 if records < 300 else 64 if records < 2_500 else 128,
    )
    for n, (records, (features, hidden), classes) in enumerate(
        itertools.product((150, 300, 600, 1_200, 2_500, 6_000), ((6, 32), (25, 32), (80, 64)), (2, 4))
    )
}  # fmt: skip


def _drawn() -> dict[str, Made]:
    """Return sixty networks and trainings of random sizes, on records of four families."""
    draw, found = random.Random(7), dict[str, Made]()
    for number in itertools.count(1):
        if len(found) == 60:
            return found
        family = draw.choice(
            ["classes", "classes", "quantiles", "pictures", "pictures", "friedman"]
        )
        records = draw.choice([400, 800, 1_500, 3_000, 6_000, 8_000, 14_000])
        batch, epochs = draw.choice([32, 64, 128, 256]), draw.choice([5, 10, 20])
        hidden, classes = draw.choice([16, 32, 64, 128]), draw.choice([2, 3, 5, 10])
        features, seed = draw.choice([8, 16, 40, 100, 200]), 1_000 + number
        if not 40 <= epochs * records / batch <= 1_200 or records / batch < 8:
            continue
        load: Callable[[], Arrays]
        if family == "classes":
            if 2 * classes > 2 ** min(features // 2, 20):
                continue
            load = _classes(records + 1_500, features, classes, seed)
        elif family == "quantiles":
            features, classes = draw.choice([5, 8, 12]), min(classes, 5)
            how = {"n_features": features, "n_classes": classes, "random_state": seed}
            load = partial(
                _generated, "make_gaussian_quantiles", -3.0, 3.0, n_samples=records + 1_500, **how
            )
        elif family == "friedman":
            features, classes = draw.choice([6, 10, 20]), 2
            how = {"n_features": features, "noise": 1.0, "random_state": seed}
            load = partial(
                _cut, "make_friedman1", 0.0, 1.0, (14.4,), n_samples=records + 1_500, **how
            )
        else:
            records, features, classes = min(records, 8_000), 196, 10
            if not 40 <= epochs * records / batch <= 1_200:
                continue
            noise, turned = draw.choice([0.0, 0.2, 0.4, 0.6]), draw.random() < 0.3
            first = draw.choice([30_000, 40_000, 50_000])
            load = partial(pictures, first, noise=noise, turned=turned)
        made = Made(load, Sizes(records, 300, 1_200), (features, hidden, classes), epochs, batch)
        found[f"drawn {len(found)} {family}"] = made
    raise AssertionError


GENERATED |= _drawn()
GENERATED |= {
    f"unit {n}": Made(
        partial(_of_length_1, _classes(records + 1_500, layers[0], layers[-1], 4_004 + n)),
        Sizes(records, 300, 1_200), layers, 10, batch, layers[0] ** -0.5,
    )
    for n, (layers, records, batch) in enumerate(
        (
            ((100, 64, 5), 2_500, 64), ((200, 64, 10), 6_000, 128),
            ((384, 32, 4), 2_500, 128), ((384, 64, 7), 2_500, 64),
        )
    )
}  # fmt: skip
MADE = {**DEVELOPMENT, **FIRST, **SECOND, **THIRD, **FOURTH, **FIFTH, **GENERATED}


def __getattr__(name: str) -> Callable[[], Task]:
    """Return the factory of a task, named as in a spec: ``classes_3k`` for classes-3k."""
    found = {key.replace("-", "_").replace(" ", "_"): made for key, made in MADE.items()}
    if name not in found:
        raise AttributeError(name)
    return partial(found[name].task, name)
