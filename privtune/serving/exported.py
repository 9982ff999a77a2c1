"""A release as an MLflow model that takes raw rows, and needs nothing of this package to be used."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.files import copy_folder, forget_times, midnight, write_whole
from privtune.imports import find_extra, libraries
from privtune.tables.raw_rows import NETWORK
from privtune.views.text import chosen_line

if TYPE_CHECKING:
    from privtune.study import Study
    from privtune.tables.raw_rows import ServedModel

_LOADER = "privtune.serving.pyfunc"
_LIBRARIES = ("torch", "numpy", "pandas", "pyarrow")


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
    _check_new(folder)
    with pyfunc_of(study, arm) as flavour:
        import mlflow
        from mlflow.exceptions import MlflowException

        with tempfile.TemporaryDirectory() as place:
            # MLflow's own files have the modes of the umask.
            model_folder = Path(place) / "model"
            model_class = model_class_of_day()
            try:
                mlflow.pyfunc.save_model(path=model_folder, mlflow_model=model_class(), **flavour)
            except MlflowException as error:
                # A disk that is full, too: MLflow words what the system says anew.
                reason = str(error).partition("\n")[0]
                raise PrivTuneError(f"{folder} could not be written: {reason}") from error
            copy_folder(model_folder, folder)
    forget_times(folder, within=True)
    return folder


def _check_new(folder: Path) -> None:
    """Refuse a target folder that is there and not empty."""
    if not folder.exists():
        return
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not is_empty:
        raise InvalidInputError("to", str(folder), "must be a new folder, or an empty one")


def tags_of(study: Study, arm: str) -> dict[str, str]:
    """Return a model's tags on its guarantee: the cost of its arm, and of all charges together."""
    release = study.release(arm)
    spent = study.spent()
    guarantee = release.guarantee
    plans = {plan.arm: plan for plan in study.plans}
    certificate = study.certificate()
    return {
        "privtune.study": study.name,
        "privtune.arm": arm,
        "privtune.epsilon_of_arm": f"{guarantee.epsilon}",
        "privtune.epsilon_of_budget": f"{spent.epsilon}",
        "privtune.quote": chosen_line(study.spec.budget, guarantee, spent),
        "privtune.delta": f"{guarantee.delta:g}",
        "privtune.adjacency": str(guarantee.adjacency),
        "privtune.unit": plans[arm].unit,
        "privtune.certificate": str(certificate["digest"]),
    }


def model_class_of_day() -> Any:
    """Return MLflow's model class with today's 00:00 UTC as time of creation: exact times are secret."""
    from mlflow.models import Model

    day = datetime.fromtimestamp(midnight(), UTC).replace(tzinfo=None)

    class ModelOfDay(Model):
        def __init__(self, *args: Any, **options: Any) -> None:
            options["utc_time_created"] = day
            super().__init__(*args, **options)

    return ModelOfDay


@contextlib.contextmanager
def pyfunc_of(study: Study, arm: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments by which MLflow's ``pyfunc`` flavour saves a released model.

    Yields:
        The arguments of ``mlflow.pyfunc.save_model``.

    Raises:
        PrivTuneError: If the arm has released no model, or its network cannot be exported.
    """
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
        package = pack_modules(Path(place))
        rows = served.rows
        example = rows.example()
        if rows.names:
            example = frames.DataFrame(example)
        yield {
            "loader_module": _LOADER.replace("privtune", package, 1),
            "data_path": str(model),
            "code_paths": [str(Path(place) / package)],
            "signature": signature,
            "input_example": example,
            # MLflow would guess them by importing everything, for seconds.
            "pip_requirements": _requirements(rows.libraries),
            "metadata": {**tags_of(study, arm), "privtune.inputs": rows.takes},
        }


def _requirements(libraries: Iterable[str]) -> list[str]:
    """Return the requirements of a model: each library at the version that is installed here.

    Args:
        libraries: Those that its rows need, beside the ones that every model needs.
    """
    requirements = []
    for name in (*_LIBRARIES, *libraries):
        release_version, _, _ = version(name).partition("+")  # no index has 2.8.0+cu128
        requirements.append(f"{name}=={release_version}")
    return requirements


def _export(served: ServedModel, path: Path, arm: str) -> None:
    """Write a model's network as an exported program for any number of rows.

    Args:
        served: The released model.
        path: Where to.
        arm: Name of the arm, for the message.

    Raises:
        PrivTuneError: If there is no such program, or it gives other numbers than the network.
    """
    import torch

    network: Any = served.network
    rows = served.rows
    example, *_ = rows.read(rows.example())
    x = torch.from_numpy(example)
    once = [1] * (x.ndim - 1)
    x = x.repeat(5, *once)
    if x.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    failure: Exception | None = None
    for strict in (False, True):  # the strict way takes len(x) for the number of rows, and longer
        try:
            with torch.no_grad():
                content = _program_of(network, x, strict=strict)
        except Exception as error:  # whatever a network of the user's makes of it
            failure = error
        else:
            # By Python: PyTorch's own writer ends the process where the disk is full.
            write_whole(path, content)
            return
    raise PrivTuneError(
        f"The network of arm {arm!r} cannot be exported as a program for any number of rows "
        f"({type(failure).__name__}), as one whose forward pass branches by the values it sees, or takes "
        "another input than the task's: save release.state_dict(), and load it into its class."
    ) from failure


def _program_of(network: Any, x: Any, *, strict: bool) -> bytes:
    """Return the bytes of a network's exported program, checked on 2 and on 10 rows after loading it.

    Args:
        network: The network.
        x: Inputs, rows first; the first two are what it is exported by.
        strict: Whether torch reads the code of the forward pass, or runs it.
    """
    import torch

    program = torch.export.export(
        network,
        (x[:2],),
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
        strict=strict,
    )
    for node in program.graph.nodes:  # which lines of whose files it came from
        node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    for rows in (x[:2], x):
        torch.testing.assert_close(loaded(rows), network(rows), rtol=1e-5, atol=1e-6)
    return content


def pack_modules(folder: Path) -> str:
    """Write the modules that a model needs into a package named by their digest; return its name.

    Two models of one process may be of two versions, and privtune itself of a third.
    """
    sources = _sources_of(_LOADER)
    parts_of_content: list[str] = []
    for name in sorted(sources):
        parts_of_content.append(f"{name}\0{sources[name]}")
    content = "\0".join(parts_of_content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    package = f"privtune_{digest[:12]}"
    for name, source in sources.items():
        _, *parts = name.split(".")
        path = folder.joinpath(package, *parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        imports_package = re.compile(r"^from privtune\.", flags=re.M)
        renamed = imports_package.sub(f"from {package}.", source)
        path.write_text(renamed)
    return package


def _sources_of(module: str) -> dict[str, str]:
    """Return by name the sources of a module and of this package's modules that it imports at its top."""
    sources: dict[str, str] = {}
    names = [module]
    while names:
        name = names.pop()
        if name in sources:
            continue
        imported = importlib.import_module(name)
        source = inspect.getsource(imported)
        sources[name] = source
        tree = ast.parse(source)
        for node in tree.body:
            if not isinstance(node, ast.ImportFrom):
                continue
            imported_name = node.module or ""
            if imported_name.startswith("privtune."):
                names.append(imported_name)
    return sources


def _signature(served: ServedModel) -> Any:
    """Return MLflow's signature of a model: its input columns or arrays, and its output columns."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    inputs = _input_specs(served)
    outputs = _output_specs(served)
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def _input_specs(served: ServedModel) -> list[Any]:
    """Return MLflow's specifications of the columns or arrays that a model takes.

    Columns are of any type, as cells of a CSV file are. None is required by MLflow: a column that is missing
    is refused in our words.
    """
    import numpy as np
    from mlflow.types import ColSpec, TensorSpec
    from mlflow.types.schema import AnyType

    rows = served.rows
    if rows.names:
        any_type = cast("Any", AnyType)()
        return [ColSpec(any_type, name, required=False) for name in rows.names]
    example = rows.example()
    arrays = example if isinstance(example, dict) else {None: example}
    specs = []
    for name, array in arrays.items():
        shape = (-1, *array.shape[1:])
        specs.append(TensorSpec(np.dtype(array.dtype), shape, name))
    return specs


def _output_specs(served: ServedModel) -> list[Any]:
    """Return MLflow's specifications of the columns that a model answers with."""
    from mlflow.types import ColSpec, DataType
    from mlflow.types.schema import AnyType

    any_type = cast("Any", AnyType)()
    column_types = {str: DataType.string, int: DataType.long, float: DataType.double}
    rows = served.rows
    inputs, usable = rows.read(rows.example())
    answers = served.answers(inputs, usable)
    specs = []
    for name, (cells, kind) in answers.items():
        kinds = {kind}
        if kind is object:
            kinds = {type(label) for label in served.labels or cells}
        column_type = any_type
        if len(kinds) == 1:
            column_type = column_types.get(kinds.pop(), any_type)
        specs.append(ColSpec(column_type, name, required=False))
    return specs
