"""A release as an MLflow model that takes raw rows, and needs nothing of this package to be used."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import forget_times, midnight
from privtune.imports import find_extra, libraries
from privtune.tasks._rows import NETWORK

if TYPE_CHECKING:
    from privtune.study import Study
    from privtune.tasks._rows import Served

_LOADER = "privtune.tracking.served"
_NEEDED = ("torch", "numpy", "pandas", "pyarrow")


def export_model(study: Study, arm: str, folder: Path) -> Path:
    """Write a released model as an MLflow model into a folder of its own.

    Args:
        study: The study.
        arm: A released arm.
        folder: Where to; it must not be there, or be empty.

    Returns:
        The folder, for ``mlflow.pyfunc.load_model`` and ``mlflow models serve``.

    Raises:
        PrivTuneError: If the arm has released no model, or its network cannot be exported.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError("to", str(folder), "must be a new folder, or an empty one")
    with pyfunc_of(study, arm) as given:
        import mlflow

        mlflow.pyfunc.save_model(path=folder, mlflow_model=dated()(), **given)
    forget_times(folder, within=True)
    return folder


def tags_of(study: Study, arm: str) -> dict[str, str]:
    """Return what a model says of its guarantee."""
    release = study.release(arm)
    (plan,) = (plan for plan in study.plans if plan.arm == arm)
    return {
        "privtune.study": study.name,
        "privtune.arm": arm,
        "privtune.epsilon": f"{release.guarantee.epsilon}",
        "privtune.delta": f"{release.guarantee.delta:g}",
        "privtune.adjacency": str(release.guarantee.adjacency),
        "privtune.unit": plan.unit,
        "privtune.certificate": str(study.certificate()["digest"]),
    }


def dated() -> Any:
    """Return MLflow's class of models under a day: a time would tell how long a round took."""
    from mlflow.models import Model

    day = datetime.fromtimestamp(midnight(), UTC).replace(tzinfo=None)

    class Dated(Model):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "utc_time_created": day})

    return Dated


@contextlib.contextmanager
def pyfunc_of(study: Study, arm: str) -> Iterator[dict[str, Any]]:
    """Give what MLflow's ``pyfunc`` flavour takes of a released model, as long as its files are there."""
    frames = find_extra("pandas", extra="ui", what="A model for MLflow")
    for name in ("mlflow.pyfunc", "torch.fx", "torch.export"):
        logging.getLogger(name).setLevel(logging.ERROR)
    served = study.release(arm).served
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's and torch.export's, about themselves
        model = Path(place) / "model"
        model.mkdir()
        served.save(model)
        with libraries():
            _export(served, model / NETWORK, arm)
            signature = _signature(served)
        package = travelling(Path(place))
        needed = (*_NEEDED, *served.rows.libraries)
        example = served.rows.example()
        yield {
            "loader_module": _LOADER.replace("privtune", package, 1),
            "data_path": str(model),
            "code_paths": [str(Path(place) / package)],
            "signature": signature,
            "input_example": frames.DataFrame(example) if served.rows.names else example,
            # Given, so that MLflow does not guess them by importing everything, for seconds.
            "pip_requirements": [f"{n}=={version(n).partition('+')[0]}" for n in needed],
            "metadata": tags_of(study, arm),
        }


def _export(served: Served, path: Path, arm: str) -> None:
    """Write the network as a program for any number of rows, which needs no class of the user's."""
    import torch

    network: Any = served.network
    x = torch.from_numpy(served.rows.read(served.rows.example())[0])
    x = x.repeat(5, *(1 for _ in x.shape[1:]))
    if x.is_floating_point():
        x = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    failed: Exception | None = None
    for strict in (False, True):  # the strict way takes len(x) for the number of rows, and longer
        try:
            with torch.no_grad():
                program = torch.export.export(
                    network,
                    (x[:2],),
                    dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
                    strict=strict,
                )
                for node in program.graph.nodes:  # which lines of whose files it came from
                    node.meta.pop("stack_trace", None)
                torch.export.save(program, path)
                loaded = torch.export.load(path).module()
                for part in (x[:2], x):
                    torch.testing.assert_close(loaded(part), network(part), rtol=1e-5, atol=1e-6)
            return
        except Exception as error:  # whatever a network of the user's makes of it
            failed = error
    raise PrivTuneError(
        f"The network of arm {arm!r} cannot be exported as a program for any number of rows "
        f"({type(failed).__name__}), as one whose forward pass branches by the values it sees, or takes "
        "another input than the task's: save release.state_dict(), and load it into its class."
    ) from failed


def travelling(folder: Path) -> str:
    """Put the modules that a model needs into a package, and return its name, which is of their content."""
    found: dict[str, str] = {}
    waiting = [_LOADER]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = inspect.getsource(importlib.import_module(name))
            nodes = ast.parse(found[name]).body
            named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            waiting += [module for module in named if module.startswith("privtune.")]
    content = "\0".join(f"{name}\0{found[name]}" for name in sorted(found))
    # Two models of one process may be of two versions, and privtune itself of a third.
    package = f"privtune_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    for name, source in found.items():
        path = folder.joinpath(package, *name.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"^from privtune\.", f"from {package}.", source, flags=re.M))
    return package


def _signature(served: Served) -> Any:
    """Return the columns or arrays that a model takes, and the columns that it answers with."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema, TensorSpec
    from mlflow.types.schema import AnyType

    rows, anything = served.rows, cast("Any", AnyType)()
    inputs: list[Any]
    if rows.names:
        # Of any type, as cells of a CSV file are; a column that is not there is refused in our words.
        inputs = [ColSpec(anything, name, required=False) for name in rows.names]
    else:
        example = rows.example()
        parts = example if isinstance(example, dict) else {None: example}
        inputs = [
            TensorSpec(np.dtype(part.dtype), (-1, *part.shape[1:]), name)
            for name, part in parts.items()
        ]
    kinds = {str: DataType.string, int: DataType.long, float: DataType.double}
    outputs: list[Any] = []
    for name, (cells, kind) in served.answers(*rows.read(rows.example())).items():
        of = {type(label) for label in served.labels or cells} if kind is object else {kind}
        known = kinds.get(of.pop()) if len(of) == 1 else None
        outputs.append(ColSpec(known or anything, name, required=False))
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))
