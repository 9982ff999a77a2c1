"""How MLflow loads an exported model. Travels with it, under another package's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException

from privtune.errors import PrivTuneError
from privtune.tasks._rows import Served

if TYPE_CHECKING:
    import pandas


class Answering:
    """A model whose refusals are one sentence to whoever asks MLflow's server."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def predict(self, model_input: Any) -> pandas.DataFrame:
        """Return a prediction for each raw row."""
        try:
            found = self._served.predict(model_input)
        except PrivTuneError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        # What is not known is null in JSON, which has no NaN.
        missing = found.isna()
        return found.astype(object).mask(missing, None) if missing.to_numpy().any() else found


def _load_pyfunc(path: str) -> Answering:
    """Load the model from its folder, as MLflow calls it."""
    return Answering(Served.load(Path(path)))
