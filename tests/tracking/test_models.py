"""Released models as MLflow models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mlflow.models import Model

from privtune.tracking.mlflow import log_model
from tests.tracked import Tracked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow's and torch.export's own
]


def test_a_model_is_logged_and_registered_with_the_ledger_s_tags(tracked: Tracked) -> None:
    import mlflow
    import torch

    uri = log_model(tracked.study, "selection", register="toy-model")
    client = tracked.client
    (version,) = client.search_model_versions("name = 'toy-model'")
    release = tracked.study.release("selection")
    assert version.tags["privtune.epsilon"] == str(release.guarantee.epsilon)
    assert version.tags["privtune.charge"] == "toy-2"
    assert json.loads(version.tags["privtune.event"])["type"] == "private_selection"
    assert version.description.startswith("Privacy budget toy")
    model = client.get_logged_model(uri.removeprefix("models:/"))
    entry = client.get_registered_model("toy-model")
    for time in (
        version.creation_timestamp,
        version.last_updated_timestamp,
        model.creation_timestamp,
        model.last_updated_timestamp,
        entry.creation_timestamp,
        entry.last_updated_timestamp,
    ):
        assert time % 86_400_000 == 0, "nothing but the day"
    for path in (tracked.folder / "privtune-artifacts" / "mlflow").rglob("*"):
        assert path.stat().st_mtime % 86_400 == 0, path

    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        folder = Path(mlflow.artifacts.download_artifacts("models:/toy-model/1"))
        loaded = mlflow.pytorch.load_model("models:/toy-model/1")
    finally:
        mlflow.set_tracking_uri(None)
    example = json.loads((folder / "input_example.json").read_text())
    rows = example if isinstance(example, list) else example.get("inputs", example.get("data"))
    assert np.shape(rows) == (2, 6)
    assert not np.any(rows), "no record is in the example"
    created = Model.load(str(folder)).utc_time_created
    assert created.endswith(" 00:00:00"), "nothing but the day"
    requirements = (folder / "requirements.txt").read_text()
    assert "torch==" in requirements

    from privtune.training.mechanism.kernel import load_params

    module = tracked.study.spec.load_task().model().eval()
    load_params(module, release.weights)
    x = torch.randn((5, 6), generator=torch.Generator().manual_seed(3))
    assert torch.allclose(loaded(x), module(x), atol=1e-6)
