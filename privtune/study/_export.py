"""All of a study that may leave the trust boundary, as one JSON document."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privtune.study._study import Study

__all__ = ["export"]


def export(study: Study) -> dict[str, Any]:
    """Return a study's spec, plans, releases and the certificate of its budget, JSON-ready."""
    arms = []
    for status in study.status():
        release = status.release
        arms.append(
            {
                "plan": status.plan.to_dict(),
                "state": status.state,
                "guarantee": status.guarantee.to_dict(),
                "release": None
                if release is None
                else {
                    "params": dict(release.params),
                    "score": _json(release.score),
                    "utility": dict(release.utility),
                    "note": release.note,
                    "model": None
                    if release.is_nothing
                    else study.model_path(status.plan.arm).relative_to(study.folder).as_posix(),
                },
            }
        )
    return {
        "format": "privtune-study",
        "version": 1,
        "spec": study.spec.model_dump(mode="json"),
        "arms": arms,
        "certificate": study.certificate(),
    }


def _json(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
