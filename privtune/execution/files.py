"""Results as bytes: safetensors, with what is no tensor as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError
from privtune.spaces import with_tuples
from privtune.strategies import TrialResult
from privtune.strategies.release import split

if TYPE_CHECKING:
    import torch


def pack_result(
    result: TrialResult, *, certificate: Mapping[str, Any] | None = None, request: str = ""
) -> bytes:
    """Return a result as the content of a safetensors file."""
    from safetensors.torch import save

    document = {
        "index": result.index,
        "params": dict(result.params),
        "score": None if result.score is None else repr(result.score),
        "curves": {name: list(values) for name, values in result.curves.items()},
        "transcript_digest": result.transcript_digest,
        "failed": result.failed,
        "unusable": result.unusable,
        "checked": result.checked,
        "shapes": {name: list(shape) for name, shape in result.shapes.items()},
    }
    metadata = {"result": json.dumps(document)}
    if certificate is not None:
        metadata["privtune"] = json.dumps(certificate)
    if request:
        metadata["request"] = request
    tensors = split(result.weights, result.shapes) or {"weights": result.weights}
    return save({name: t.contiguous() for name, t in tensors.items()}, metadata=metadata)


def unpack_result(content: bytes) -> TrialResult:
    """Return what :func:`pack_result` packed."""
    header = _header(content)
    metadata = header.get("__metadata__", {})
    if "result" not in metadata:
        raise PrivTuneError("A stored model is not a trial's result: the store was edited.")
    document = json.loads(metadata["result"])
    document["params"] = {name: with_tuples(v) for name, v in document["params"].items()}
    # A parameter of a model may be called "weights", too.
    named = document["shapes"] and document["shapes"].keys() <= header.keys()
    names = list(document["shapes"]) if named else ["weights"]
    score = document.pop("score")

    def weights() -> torch.Tensor:
        import torch
        from safetensors.torch import load

        tensors = load(content)
        return torch.cat([tensors[name].reshape(-1) for name in names])

    return TrialResult(
        weights=weights,
        score=None if score is None else float(score),
        **document,
    )


def request_of(content: bytes) -> str:
    """Return the request stored with a packed result; empty for a row of a round."""
    return str(_header(content).get("__metadata__", {}).get("request", ""))


def _header(content: bytes) -> Any:
    # JSON, after its length: https://github.com/huggingface/safetensors#format
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
