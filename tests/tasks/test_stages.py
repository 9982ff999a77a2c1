"""Stages: sensitivities by enumeration, the noise that is drawn, and what becomes of a release."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from privtune.accounting import Adjacency, Gaussian, epsilon
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.stages.dp_pca import DpPca
from privtune.stages.histogram import Histogram
from privtune.stages.quantiles import Quantiles
from privtune.stages.spec_stages import STAGES, make_stage, staged_task
from privtune.stages.stage_plan import StagePlan, plan_stage, release_stage
from privtune.tasks import get_task
from privtune.training.mechanism.metrics import (
    count_sensitivity,
    counts,
    moment_sensitivity,
    moments,
    noised,
    symmetric,
)
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams

BOTH = tuple(Adjacency)


def table(path: Path, **changes: Any) -> dict[str, Any]:
    spec = {
        "type": "tabular",
        "path": str(path),
        "target": "y",
        "classes": ["no", "yes"],
        "columns": {
            "age": {"bounds": "paid", "within": [0, 128], "missing": 500},
            "income": {"bounds": "paid"},
            "sex": {"categories": ["f", "m"]},
            "z": [-1, 1],
        },
        "class_weights": "paid",
        "train": 1600,
        "validation": 200,
        "test": 200,
    }
    return {**spec, **changes}


def people(count: int = 2000) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "age": rng.uniform(20, 80, count),
            "income": np.exp(rng.normal(10, 0.5, count)),
            "sex": rng.choice(["f", "m", "x"], count),
            "z": rng.uniform(-1, 1, count),
            "y": np.where(rng.random(count) < 0.2, "yes", "no"),
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    people().to_csv(tmp_path / "people.csv", index=False)
    return tmp_path / "people.csv"


def moved(vectors: list[np.ndarray], adjacency: Adjacency) -> float:
    """Return the largest step between neighbours, over all records there can be."""
    nothing = np.zeros_like(vectors[0])
    pairs = (
        itertools.combinations(vectors, 2)
        if adjacency is Adjacency.REPLACE_ONE
        else ((v, nothing) for v in vectors)
    )
    return max(float(np.linalg.norm(a - b)) for a, b in pairs)


@pytest.mark.quick
@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_counts_move_by_no_more_than_their_sensitivity_and_as_much(
    columns: int, adjacency: Adjacency
) -> None:
    sizes = (3,) * columns
    every = itertools.product(range(-1, 4), repeat=columns)  # 3 is in no cell
    vectors = [counts(np.array([record]), sizes) for record in every]
    assert moved(vectors, adjacency) == pytest.approx(count_sensitivity(columns, adjacency))
    rng = np.random.default_rng(0)
    data = rng.integers(-1, 3, (30, columns))
    alone = sum(counts(row[None], sizes) for row in data)
    assert (counts(data, sizes) == alone).all()  # a sum over records


@pytest.mark.quick
@pytest.mark.parametrize("adjacency", BOTH)
def test_moments_move_by_no_more_than_their_sensitivity_and_as_much(adjacency: Adjacency) -> None:
    grid = [*itertools.product((-3.0, -0.6, 0.0, 0.5, 1e30, math.nan, math.inf), repeat=3)]
    vectors = [moments(np.array([record])) for record in grid]
    largest, bound = moved(vectors, adjacency), moment_sensitivity(adjacency)
    assert largest <= bound
    assert largest == pytest.approx(bound, rel=1e-9)
    data = np.random.default_rng(1).normal(size=(40, 4))
    clipped = data / np.maximum(1.0, np.linalg.norm(data, axis=1, keepdims=True))
    np.testing.assert_allclose(symmetric(moments(data)), clipped.T @ clipped, atol=1e-9)
    # An isometry, so that distances of matrices are those that were charged.
    a, b = moments(data[:1]), moments(data[1:2])
    assert np.linalg.norm(a - b) == pytest.approx(np.linalg.norm(symmetric(a) - symmetric(b)))


@pytest.mark.statistical
@pytest.mark.parametrize("noise", ["plain", "secure"])
def test_noise_is_gaussian_of_the_scale_that_is_charged(noise: str) -> None:
    """Kolmogorov-Smirnov over 20,000 draws at 1e-4; two thirds and three halves of it are found."""
    sums = np.arange(20_000.0)
    options = NoiseOptions.of(noise)
    drawn = noised(sums, scale=3.0, streams=Streams(bytes(32)), noise=options) - sums
    assert stats.kstest(drawn / 3.0, "norm").pvalue > 1e-4
    for wrong in (2.0, 4.5):
        assert stats.kstest(drawn / wrong, "norm").pvalue < 1e-4
    again = noised(sums, scale=3.0, streams=Streams(bytes(32)), noise=options) - sums
    assert (drawn == again).all()


def planned(stage: Any, spec: dict[str, Any], adjacency: Adjacency) -> StagePlan:
    return plan_stage(
        stage,
        spec,
        epsilon=4.0,
        delta=1e-5,
        adjacency=adjacency,
        noise=NoiseOptions(),
        public_facts={},
        dataset=None,
    )


@pytest.mark.parametrize("adjacency", BOTH)
def test_a_share_is_met_and_the_noise_is_the_multiplier_times_the_sensitivity(
    path: Path, adjacency: Adjacency
) -> None:
    plan = planned(Quantiles(epsilon_share=0.25), table(path), adjacency)
    assert isinstance(plan.event, Gaussian)
    assert 0.99 < epsilon(plan.event, 1e-5, adjacency=adjacency).epsilon <= 1.0
    assert plan.scale == plan.event.noise_multiplier * count_sensitivity(2, adjacency)
    assert StagePlan.from_dict(plan.to_dict()) == plan
    direct = planned(DpPca(components=2, noise_multiplier=7.0), table(path), adjacency)
    assert direct.scale == 7.0 * moment_sensitivity(adjacency)


def released(stage: Any, spec: dict[str, Any], multiplier: float = 0.5) -> dict[str, Any]:
    stage = make_stage(
        {
            **stage.to_dict(),
            "epsilon_share": None,
            "noise_multiplier": multiplier,
        }
    )
    plan = planned(stage, spec, Adjacency.ADD_REMOVE)
    return release_stage(plan, spec, Streams(bytes(32)))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_quantiles_find_the_bounds(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"people.{suffix}"
    frame = people()
    frame.loc[0, "age"] = np.nan  # in no cell
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    document = released(Quantiles(), table(path))
    assert document == {"bounds": {"age": [20.0, 80.0], "income": [4096.0, 131072.0]}}
    done = Quantiles().applied(table(path), document)
    assert done["columns"]["age"] == {"bounds": [20.0, 80.0], "missing": 80.0}  # 500, clipped
    assert done["columns"]["z"] == [-1, 1]
    # Nothing but noise: the whole grid, whatever the records are.
    assert released(Quantiles(), table(path), 1e5)["bounds"]["age"] == [0.0, 128.0]


def test_a_histogram_weighs_the_classes_by_the_inverse_of_their_counts(path: Path) -> None:
    document = released(Histogram(), table(path))
    truth = people()["y"].value_counts()
    for name in ("no", "yes"):
        assert document["counts"][name] == pytest.approx(truth[name], abs=3)
    weights = document["class_weights"]
    assert weights[1] / weights[0] == pytest.approx(truth["no"] / truth["yes"], rel=0.05)
    assert released(Histogram(most=2.0), table(path))["class_weights"] == pytest.approx(
        [2 / 3, 4 / 3]
    )
    sexes = released(Histogram(column="sex"), table(path))
    assert set(sexes["counts"]) == {"f", "m"}
    assert "class_weights" not in sexes


def test_dp_pca_finds_the_directions_and_the_task_is_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(3000, 2)) @ np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    frame = pd.DataFrame(0.2 * hidden + 0.001 * rng.normal(size=hidden.shape))
    frame.columns = [f"c{i}" for i in range(6)]
    frame["y"] = rng.choice(["no", "yes"], len(frame))
    path = tmp_path / "wide.csv"
    frame.to_csv(path, index=False)
    spec = table(path, columns={f"c{i}": [-1, 1] for i in range(6)})
    del spec["class_weights"]
    stage = DpPca(components=2)
    assert get_task(staged_task(spec, [stage])).input_shape == (2,)
    document = released(stage, spec, 0.1)
    found = np.array(document["projection"])
    np.testing.assert_allclose(found @ found.T, np.eye(2), atol=1e-9)
    kept = hidden @ found.T
    assert (kept**2).sum() > 0.999 * (hidden**2).sum()
    done = get_task(stage.applied(spec, document))
    whole, projected = get_task(spec).load().train, done.load().train
    assert done.input_shape == (2,)
    assert len(whole) == len(projected)
    np.testing.assert_allclose(projected.x.numpy(), whole.x.numpy() @ found.T, atol=1e-5)


def test_what_is_to_be_paid_for_is_never_loaded_before(path: Path) -> None:
    with pytest.raises(
        PrivTuneError, match="bounds of age, bounds of income, class_weights of the"
    ):
        get_task(table(path)).load()


def test_stages_go_with_tables_alone() -> None:
    with pytest.raises(InvalidInputError, match="go with a table"):
        staged_task("digits-mlp", [Histogram()])
    assert list(STAGES) == ["usable", "quantiles", "histogram", "dp-pca"]
