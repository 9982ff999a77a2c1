"""Results as files: safetensors with their JSON beside the tensors, there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privtune.errors import PrivTuneError
from privtune.files import create_private, private_folder
from privtune.strategies import TrialResult
from privtune.strategies.release import split

__all__ = ["read_result", "write_result"]


def write_result(
    result: TrialResult,
    path: Path,
    *,
    certificate: Mapping[str, Any] | None = None,
) -> None:
    """Write a result so that it is there whole or not at all.

    Args:
        result: The result. If it knows its shapes, the file holds the parameters by name, so that
            a reader without PrivTune can load them into the model; else the flat vector.
        path: Where.
        certificate: What the release cost, for whoever finds the file.
    """
    from safetensors.torch import save_file

    document = {
        "index": result.index,
        "params": dict(result.params),
        "score": None if result.score is None else repr(result.score),
        "curves": {name: list(values) for name, values in result.curves.items()},
        "transcript_digest": result.transcript_digest,
        "failed": result.failed,
        "unusable": result.unusable,
        "shapes": {name: list(shape) for name, shape in result.shapes.items()},
    }
    metadata = {"result": json.dumps(document)}
    if certificate is not None:
        metadata["privtune"] = json.dumps(certificate)
    tensors = split(result.weights, result.shapes) or {"weights": result.weights}
    private_folder(path.parent)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    create_private(partial)
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata=metadata)
    partial.replace(path)


def read_result(path: Path) -> TrialResult:
    """Read what :func:`write_result` wrote."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "result" not in metadata:
            raise PrivTuneError(f"{path.name} is not a trial's result; move it away and run again.")
        document = json.loads(metadata["result"])
        flat = "weights" in file.keys()  # noqa: SIM118 (not a mapping)
        names = ["weights"] if flat else list(document["shapes"])
        parts = [file.get_tensor(name).reshape(-1) for name in names]
    score = document.pop("score")
    return TrialResult(
        weights=torch.cat(parts), score=None if score is None else float(score), **document
    )
