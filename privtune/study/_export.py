"""All of a study that may leave the trust boundary, as one JSON document."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from privtune.numbers import json_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from privtune.study.observer import ArmStatus, StageStatus
    from privtune.study.spec import StudySpec


def export(
    spec: StudySpec,
    arms: Sequence[ArmStatus],
    *,
    model: Callable[[str], Path],
    certificate: Mapping[str, Any],
    stages: Sequence[StageStatus] = (),
) -> dict[str, Any]:
    """Return a study's spec, plans, releases and the certificate of its budget, JSON-ready.

    Args:
        spec: The study's spec.
        arms: How each of its arms stands.
        model: Returns where an arm's released model lies, relative to the study's folder.
        certificate: The certificate of its budget.
        stages: How each of its stages stands.
    """
    documents = []
    for status in arms:
        release = status.release
        documents.append(
            {
                "plan": status.plan.to_dict(),
                "state": status.state,
                "guarantee": status.guarantee.to_dict(),
                "release": None
                if release is None
                else {
                    "params": json_ready(release.params),
                    "score": _json(release.score),
                    "utility": dict(release.utility),
                    "note": release.note,
                    "model": None if release.is_nothing else model(status.plan.arm).as_posix(),
                },
            }
        )
    return {
        "format": "privtune-study",
        "version": 1,
        "spec": spec.model_dump(mode="json"),
        "arms": documents,
        **({"stages": [stage.to_dict() for stage in stages]} if stages else {}),
        "certificate": dict(certificate),
    }


def _json(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
