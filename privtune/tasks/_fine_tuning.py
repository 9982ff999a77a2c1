"""Fine-tuning a task's model: public weights from a file, and which part of it is trained."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.tasks._facts import TaskDataError
from privtune.tasks._task import Task

if TYPE_CHECKING:
    import torch

FIELDS = ("type", "task", "pretrained", "trainable", "target_modules", "precision")
"""Fields of ``task: {type: fine-tuning, ...}`` in a spec."""

PART = "trainable"
"""The hyperparameter of a candidate that says which part of the task's model it trains."""

_LORA = re.compile(r"lora:([1-9]\d{0,3})")
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")  # read as weights alone


def fine_tuned(
    task: Task,
    *,
    pretrained: str | None = None,
    trainable: str = "all",
    target_modules: Sequence[str] | None = None,
    precision: str | None = None,
) -> Task:
    """Return a task whose model starts from public weights, and of which a part is trained.

    What the weights were trained on is assumed public: no guarantee here protects it.

    Args:
        task: The task; its model is built as before, and then given the weights.
        pretrained: A safetensors file, a folder of them as Hugging Face keeps it, or a state dict that
            ``torch.save`` wrote, by the names of the model's parameters; the head may be missing. None if
            the model comes with its weights.
        trainable: ``"all"``, ``"head"``, ``"biases"`` (with the head) or ``"lora:R"`` (with the head).
        target_modules: With ``lora:R``: names of linear layers and convolutions, or how these end; None
            for all linear layers, or all convolutions where there are none.
        precision: ``"bfloat16"`` for the passes alone; norms, clipping, sums, noise and weights stay in
            float32. None for what the task says.

    Raises:
        InvalidInputError: If there is no such file, or ``trainable`` is none of these.

    Example:
        >>> from privtune.tasks import get_task
        >>> task = fine_tuned(get_task("digits-mlp"), trainable="lora:2")
        >>> task.facts.to_dict()["trained part"]
        'lora:2'
        >>> [name for name, p in task.model().named_parameters() if p.requires_grad]
        ['0.down.weight', '0.up.weight', '2.weight', '2.bias']
    """
    weights = None if pretrained is None else weights_at(pretrained)
    kind, rank = check_part(trainable, target_modules)
    targets = None if target_modules is None else tuple(target_modules)
    return replace(
        task,
        name=task.name if trainable == "all" else f"{task.name}, {trainable}",
        model=_Model(task.model, weights, kind, rank, targets),
        pretrained=None if weights is None else f"{weights.path.name}, SHA-256 {weights.digest}",
        trainable=trainable if targets is None else f"{trainable} in {', '.join(targets)}",
        precision=precision or task.precision,
        constants={},  # of other first parameters, or of another model
    )


def check_part(trainable: object, targets: Sequence[str] | None = None) -> tuple[str, int]:
    """Return what is trained (all, head, biases, or lora:R as lora), and the rank of adapters, or 0."""
    listed = isinstance(targets, list | tuple) and all(isinstance(name, str) for name in targets)
    if targets is not None and not (listed and targets):
        raise InvalidInputError("target_modules", targets, "must be a list of names")
    rank = _LORA.fullmatch(trainable) if isinstance(trainable, str) else None
    if rank is not None:
        return "lora", int(rank.group(1))
    if targets is not None:
        raise InvalidInputError(
            "target_modules", list(targets), f"goes with lora:R, not with {trainable}"
        )
    if not isinstance(trainable, str) or trainable not in ("all", "head", "biases"):
        raise InvalidInputError("trainable", trainable, "must be all, head, biases or lora:R")
    return trainable, 0


def for_candidate(task: Task, params: Mapping[str, Any]) -> Task:
    """Return the task as a candidate trains it: of its model the part that its hyperparameters name."""
    if PART not in params:
        return task
    kind, rank = check_part(params[PART])
    if not isinstance(task.model, _Model):
        return fine_tuned(task, trainable=params[PART])
    model = replace(task.model, kind=kind, rank=rank)
    return replace(task, model=model, trainable=params[PART])


@dataclass(frozen=True)
class _Weights:
    """Public weights by their place and digest."""

    path: Path
    digest: str

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by name, read once; they must not be written to."""
        return _read(self.path, self.digest)


def weights_at(place: Any, *, field: str = "pretrained") -> _Weights:
    """Return the public weights of a safetensors file, or of a folder of them; refuse another place."""
    if not isinstance(place, str) or "\0" in place:
        raise InvalidInputError(field, place, "must be the path of a file or folder")
    path = Path(place).expanduser().absolute()
    return _Weights(path, _digest(_files(path, field)))


@lru_cache(maxsize=4)
def _read(path: Path, digest: str) -> Mapping[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = _files(path)
    if _digest(files) != digest:
        raise TaskDataError(f"{path} has changed since it was planned with; plan the study again.")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= _state_dict(file) if file.suffix in _TORCH else load_file(file)
        except SafetensorError as error:
            raise TaskDataError(f"{file} cannot be read as safetensors ({error}).") from error
    return tensors


def _state_dict(file: Path) -> Mapping[str, torch.Tensor]:
    """Return what ``torch.save(model.state_dict(), file)`` wrote; a pickle of anything else is not run."""
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # pickle, zipfile and torch raise types of their own
        found = None
    if not isinstance(found, dict) or not all(map(torch.is_tensor, found.values())):
        raise TaskDataError(
            f"{file} holds more than a state dict, and other pickles may run any program. Save it by "
            "torch.save(model.state_dict(), PATH), or by safetensors.torch.save_file."
        )
    return found


def _files(path: Path, field: str = "pretrained") -> list[Path]:
    """Return the files of a place, or refuse it."""
    hint = (
        "It is a folder that save_pretrained of Hugging Face has written."
        if field == "task.encoder"
        else "Save weights with safetensors.torch.save_file(model.state_dict(), PATH)."
    )
    if path.is_dir():
        if found := sorted(path.glob("*.safetensors")):
            if wrong := [each.name for each in found if not each.is_file()]:
                raise InvalidInputError(
                    field, str(path), f"holds {wrong[0]}, no regular file", hint
                )
            return found
        raise InvalidInputError(field, str(path), "holds no *.safetensors", hint)
    if not path.is_file():
        raise InvalidInputError(field, str(path), "must be a file or a folder", hint)
    return [path]


def _digest(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            each = hashlib.file_digest(opened, "sha256").hexdigest()
        found.update(f"{file.name if len(files) > 1 else ''}:{each}\n".encode())
    return each if len(files) == 1 else found.hexdigest()


@dataclass(frozen=True)
class _Model:
    """Makes the model: equal ones are one model to whatever keeps what it captured of it."""

    make: Callable[[], torch.nn.Module]
    weights: _Weights | None
    kind: str
    rank: int
    targets: tuple[str, ...] | None

    def __call__(self) -> torch.nn.Module:
        from privtune.training.engine.fine_tuning import load_public, set_trainable

        model = self.make()
        drawn: set[str] = set()
        if self.weights is not None:
            drawn = load_public(model, self.weights.tensors(), source=str(self.weights.path))
        model = set_trainable(model, self.kind, rank=self.rank, targets=self.targets)
        if self.weights is not None:
            # What is trained is written to; what is frozen stays the one copy there is.
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and name not in drawn:
                    parameter.data = parameter.data.clone()
        return model


def from_spec(data: Mapping[str, Any], get: Callable[[Any], Task]) -> Task:
    """Return the task that ``task: {type: fine-tuning, ...}`` describes, of a task that ``get`` returns."""
    if unknown := sorted(set(data) - set(FIELDS)):
        raise InvalidInputError("task", unknown, f"a fine-tuning takes {', '.join(FIELDS)} alone")
    if "task" not in data:
        raise InvalidInputError("task", sorted(data), "must name the task that is fine-tuned: task")
    trainable, targets = data.get("trainable", "all"), data.get("target_modules")
    if not isinstance(trainable, str):
        raise InvalidInputError("task.trainable", trainable, "must be all, head, biases or lora:R")
    return fine_tuned(
        get(data["task"]),
        pretrained=data.get("pretrained"),
        trainable=trainable,
        target_modules=targets,
        precision=data.get("precision"),
    )
