"""``privtune demo``: the main job on real data, in a minute or two."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated

import typer

from privtune.cli._common import console
from privtune.files import private_folder


def demo(
    folder: Annotated[Path, typer.Option(help="Where the study is kept.")] = Path("demo-output"),
) -> None:
    """Compare three strategies on handwritten digits under one budget of ε = 8."""
    from privtune.cli._progress import run_study
    from privtune.cli._specs import made
    from privtune.cli._tables import print_comparison
    from privtune.errors import PrivTuneError
    from privtune.study import StudySpec

    private_folder(folder)
    storage = f"sqlite:///{folder / 'privtune.db'}"
    text = importlib.resources.files("privtune.tasks") / "digits-demo.yaml"
    with importlib.resources.as_file(text) as path:
        spec = StudySpec.from_file(path)
    console().print(
        f"Planning study [bold]{spec.name}[/]: {len(spec.arms)} arms on {spec.task}, one budget of "
        f"ε = {spec.budget.epsilon:g}, δ = {spec.budget.delta:g}.",
        soft_wrap=True,
        highlight=False,
    )
    study, others = made(spec, storage)
    if others:
        study.close()
        raise PrivTuneError(
            f"{folder} holds a study that was created with other {', '.join(others)} than this version's "
            f"demo has. Remove {folder}, or choose another --folder."
        )
    try:
        if study.finished:
            console().print(
                f"This study is finished and its budget spent; nothing was run. Remove {folder} to start "
                "over with a new budget (these records are public: on private ones a new budget would "
                "not make the spent one whole).",
                soft_wrap=True,
            )
        else:
            run_study(study, mlflow=True, quiet=False)
    finally:
        print_comparison(study)
        study.close()
