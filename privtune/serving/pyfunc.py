"""The loader of an exported model for MLflow, which travels with it under another package's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException

from privtune.errors import PrivTuneError
from privtune.tables.raw_rows import ServedModel

if TYPE_CHECKING:
    import pandas


class Answering:
    """A wrapper of a model that turns a refusal into one sentence for clients of MLflow's server."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def predict(self, model_input: Any) -> pandas.DataFrame:
        """Return a prediction for each raw row.

        Raises:
            MlflowException: If rows cannot be read: of this type alone MLflow's server shows the sentence.
        """
        try:
            predictions = self._served.predict(model_input)
        except PrivTuneError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        is_missing = predictions.isna()
        if not is_missing.to_numpy().any():
            return predictions
        # What is not known is null in JSON, which has no NaN.
        return predictions.astype(object).mask(is_missing, None)


def _load_pyfunc(path: str) -> Answering:
    """Load the model of a folder; MLflow calls this function by its name."""
    return Answering(ServedModel.load(Path(path)))
