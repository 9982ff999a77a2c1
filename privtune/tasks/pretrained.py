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
from privtune.facts import TaskDataError
from privtune.names import refuse_fields, refuse_name
from privtune.tasks.task import Task

if TYPE_CHECKING:
    import torch

FIELDS = ("type", "task", "pretrained", "trainable", "target_modules", "precision")
"""Fields of ``task: {type: fine-tuning, ...}`` in a spec."""

PART = "trainable"
"""The hyperparameter that names the part of a task's model which a candidate trains."""

_PARTS = ("all", "head", "biases")
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
    """Return a task whose model starts from public weights and is trained as a whole or in part.

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
    weights = None
    source = None
    if pretrained is not None:
        weights = weights_at(pretrained)
        source = f"{weights.path.name}, SHA-256 {weights.digest}"
    kind, rank = check_part(trainable, target_modules)
    targets = None
    part = trainable
    if target_modules is not None:
        targets = tuple(target_modules)
        part = f"{trainable} in {', '.join(targets)}"
    return replace(
        task,
        name=task.name if trainable == "all" else f"{task.name}, {trainable}",
        model=_Model(task.model, weights, kind, rank, targets),
        pretrained=source,
        trainable=part,
        precision=precision or task.precision,
        constants={},  # of other first parameters, or of another model
    )


def check_part(trainable: object, targets: Sequence[str] | None = None) -> tuple[str, int]:
    """Return the kind of a trainable part (all, head, biases or lora), and the rank of adapters, or 0.

    Args:
        trainable: As the user writes it.
        targets: Names of the layers that adapters go beside.

    Raises:
        InvalidInputError: If it is none of these, or targets are given without adapters.
    """
    if targets is not None and not _are_names(targets):
        raise InvalidInputError("target_modules", targets, "must be a list of names")
    rank = _LORA.fullmatch(trainable) if isinstance(trainable, str) else None
    if rank is not None:
        return "lora", int(rank.group(1))
    if targets is not None:
        raise InvalidInputError(
            "target_modules",
            list(targets),
            f"goes with lora:R, not with {trainable}",
        )
    if not isinstance(trainable, str) or trainable not in _PARTS:
        refuse_name("trainable", trainable, _PARTS, also="or lora:R")
    return trainable, 0


def _are_names(names: object) -> bool:
    """Return whether a value is a list of at least one name."""
    if not isinstance(names, list | tuple) or not names:
        return False
    return all(isinstance(name, str) for name in names)


def for_candidate(task: Task, params: Mapping[str, Any]) -> Task:
    """Return the task with the trainable part that a candidate's hyperparameters name.

    Public weights that the task starts from stay: only which of them are trained is the candidate's.
    """
    if PART not in params:
        return task
    kind, rank = check_part(params[PART])
    if not isinstance(task.model, _Model):
        return fine_tuned(task, trainable=params[PART])
    model = replace(task.model, kind=kind, rank=rank)
    return replace(task, model=model, trainable=params[PART])


@dataclass(frozen=True)
class _PublicWeights:
    """Public weights on disk: their path and SHA-256."""

    path: Path
    digest: str

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the cached tensors by name, which callers must not write to."""
        return _read(self.path, self.digest)


def weights_at(place: Any, *, field: str = "pretrained") -> _PublicWeights:
    """Return the public weights of a file or folder, or refuse a path without weights.

    Args:
        place: The path, as the user writes it.
        field: Where it was written, for an error.
    """
    if not isinstance(place, str) or "\0" in place:
        raise InvalidInputError(field, place, "must be the path of a file or folder")
    path = Path(place).expanduser().absolute()
    files = _files(path, field)
    return _PublicWeights(path, _digest(files))


@lru_cache(maxsize=4)
def _read(path: Path, digest: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a file or folder, or refuse weights that changed since the planning."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = _files(path)
    if _digest(files) != digest:
        raise TaskDataError(f"{path} has changed since it was planned with; plan the study again.")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix in _TORCH:
            tensors |= _state_dict(file)
            continue
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise TaskDataError(f"{file} cannot be read as safetensors ({error}).") from error
    return tensors


def _state_dict(file: Path) -> Mapping[str, torch.Tensor]:
    """Return the state dict in a file of ``torch.save``, and refuse other pickles without running them."""
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # pickle, zipfile and torch raise types of their own
        state = None
    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise TaskDataError(
            f"{file} holds more than a state dict, and other pickles may run any program. Save it by "
            "torch.save(model.state_dict(), PATH), or by safetensors.torch.save_file."
        )
    return state


def _files(path: Path, field: str = "pretrained") -> list[Path]:
    """Return the files of weights at a path, or refuse a path that holds none."""
    hint = (
        "It is a folder that save_pretrained of Hugging Face has written."
        if field == "task.encoder"
        else "Save weights with safetensors.torch.save_file(model.state_dict(), PATH)."
    )
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidInputError(field, str(path), "must be a file or a folder", hint)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InvalidInputError(field, str(path), "holds no *.safetensors", hint)
    for file in files:
        if not file.is_file():  # reading a pipe would wait for ever
            raise InvalidInputError(
                field,
                str(path),
                f"holds {file.name}, no regular file",
                hint,
            )
    return files


def _digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the names and digests of several."""
    if len(files) == 1:
        return _file_digest(files[0])
    names_and_digests = hashlib.sha256()
    for file in files:
        names_and_digests.update(f"{file.name}:{_file_digest(file)}\n".encode())
    return names_and_digests.hexdigest()


def _file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class _Model:
    """Factory of a fine-tuned model, comparable by value so that caches treat equal factories as one.

    Attributes:
        make: Builds the model of the task that is fine-tuned.
        weights: What it starts from; None to start from what ``make`` says.
        kind: Which part is trained: all, head, biases or lora.
        rank: Of adapters; 0 without.
        targets: Layers that adapters go beside; None for those of the default.
    """

    make: Callable[[], torch.nn.Module]
    weights: _PublicWeights | None
    kind: str
    rank: int
    targets: tuple[str, ...] | None

    def __call__(self) -> torch.nn.Module:
        """Build the model with its public weights, and with gradients for the trained part alone."""
        from privtune.training.engine.fine_tuning import load_public, set_trainable

        model = self.make()
        if self.weights is None:
            return set_trainable(
                model,
                self.kind,
                rank=self.rank,
                targets=self.targets,
            )
        absent = load_public(model, self.weights.tensors(), source=str(self.weights.path))
        model = set_trainable(model, self.kind, rank=self.rank, targets=self.targets)
        # What is trained is written to; what is frozen stays the one copy there is.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in absent:
                parameter.data = parameter.data.clone()
        return model


def from_spec(data: Mapping[str, Any], get: Callable[[Any], Task]) -> Task:
    """Return the task that ``task: {type: fine-tuning, ...}`` describes, getting its base by ``get``.

    Raises:
        InvalidInputError: If a field is unknown, or there is no task to fine-tune.
    """
    unknown = set(data) - set(FIELDS)
    if unknown:
        refuse_fields("task", unknown, FIELDS, "a fine-tuning")
    if "task" not in data:
        raise InvalidInputError("task", sorted(data), "must name the task that is fine-tuned: task")
    trainable = data.get("trainable", "all")
    if not isinstance(trainable, str):
        raise InvalidInputError("task.trainable", trainable, "must be all, head, biases or lora:R")
    return fine_tuned(
        get(data["task"]),
        pretrained=data.get("pretrained"),
        trainable=trainable,
        target_modules=data.get("target_modules"),
        precision=data.get("precision"),
    )
