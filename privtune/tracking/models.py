"""Released models in MLflow's own format, and in its registry, when somebody asks for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.files import forget_times, midnight
from privtune.ledger.places import artifact_root
from privtune.tasks._fine_tuning import for_candidate
from privtune.tracking.mlflow import sync_study
from privtune.tracking.store import experiment_id, open_client, published, tracking_uri
from privtune.views.record import budget_view
from privtune.views.text import budget_line

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Study


def log_model(
    study: Study, arm: str, *, register: str | None = None, uri: str | None = None
) -> str:
    """Log a released model as an MLflow model of its arm's run, and register it if asked.

    The input example is made of zeros: MLflow keeps it in clear, so it must never hold a record. It
    has two rows, or the exported model would take one row at a time only.

    Args:
        study: The study.
        arm: A released arm.
        register: Name in the model registry; a new version is made, with tags from the ledger.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.

    Returns:
        The model's URI.

    Raises:
        PrivTuneError: If the arm has released no model.
        TrackingUnavailableError: If the store cannot be reached.
    """
    release = study.release(arm)
    (plan,) = (plan for plan in study.plans if plan.arm == arm)
    if release.is_nothing:
        raise PrivTuneError(f"Arm {arm!r} of study {study.name!r} has released no model.")
    sync_study(study, uri=uri)
    place = tracking_uri(study.storage, uri)
    with open_client(study.storage, place) as client, _fluent(place):
        experiment = experiment_id(client, study.name, storage=study.storage, tags={})
        run = published(client, experiment).get(plan.digest())
        if run is None:
            raise PrivTuneError(
                f"Arm {arm!r} cannot be logged before every sealed arm of study {study.name!r} has "
                "been released."
            )
        info = _save(study, release, run, register)
        forget_times(artifact_root(study.storage) / "mlflow", within=True)
        if register is not None:
            number = str(info.registered_model_version)
            for name, value in _ledger_tags(study, plan, release).items():
                client.set_model_version_tag(register, number, name, value)
            view = budget_view(study)
            note = budget_line(study.spec.budget, view.spent, view.left)
            client.update_model_version(register, number, description=note)
    return str(info.model_uri)


def _save(study: Study, release: Release, run: str, register: str | None) -> Any:
    import mlflow
    import numpy as np
    from mlflow.models import Model

    day = datetime.fromtimestamp(midnight(), UTC).replace(tzinfo=None)

    class Dated(Model):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "utc_time_created": day})

    from privtune.execution.training import model_of

    task = for_candidate(study.spec.load_task(), release.params)
    number = np.float32 if task.tokens is None else np.int64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's and torch.export's, about themselves
        return Dated.log(
            artifact_path=None,
            name="model",
            flavor=mlflow.pytorch,
            run_id=run,
            registered_model_name=register,
            pytorch_model=model_of(task, release.weights),
            input_example=np.zeros((2, *task.input_shape), dtype=number),
            # Given, so that MLflow does not guess them by importing everything, for seconds.
            pip_requirements=[f"torch=={version('torch')}", f"numpy=={version('numpy')}"],
        )


def _ledger_tags(study: Study, plan: Plan, release: Release) -> dict[str, str]:
    charges = [c for c in budget_view(study).charges if (c.study, c.arm) == (study.name, plan.arm)]
    return {
        "privtune.epsilon": f"{release.guarantee.epsilon}",
        "privtune.delta": f"{release.guarantee.delta:g}",
        "privtune.adjacency": str(release.guarantee.adjacency),
        "privtune.unit": plan.unit,
        "privtune.method": release.guarantee.method,
        "privtune.charge": charges[-1].id if charges else "",
        "privtune.event": plan.event.to_json()[:5_000],
    }


@contextlib.contextmanager
def _fluent(uri: str) -> Iterator[None]:
    """Point MLflow's global functions, which its model flavours use, at a store for a while."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
