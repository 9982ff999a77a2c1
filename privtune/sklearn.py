"""Estimators for scikit-learn that train under a budget: each ``fit`` is charged before it sees a record.

What is public is a parameter: bounds of features and target, classes, number of records. Importing this
module imports scikit-learn, and no torch.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from privtune.accounting._checks import check_integer
from privtune.api import create_study
from privtune.errors import InvalidInputError
from privtune.imports import find_extra
from privtune.ledger import Budget
from privtune.ledger.urls import masked_url
from privtune.strategies import Fixed, InRun, Strategy
from privtune.strategies.arms import needs_of
from privtune.strategies.in_run import method_class
from privtune.study.delta import check_delta
from privtune.study.failures import UnusableRecordsError

find_extra("sklearn", extra="demo", what="privtune.sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # noqa: E402
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

if TYPE_CHECKING:
    import torch

    from privtune.study import Trial

__all__ = ["PrivateClassifier", "PrivateRegressor", "PublicFactWarning"]

FROM_Y = "from y"
_LEAST, _WHOLE = 0.2, 0.8  # of the declared records: what a fold has at least, and what is no fold
_BATCHES = 16  # expected batches of an epoch
_RATES = (0.05, 5.0)  # of a strategy that searches, for inputs in [-1, 1]
_NORMS = (0.1, 10.0)

Floats = npt.NDArray[np.float64]


class PublicFactWarning(UserWarning):
    """A fact was read from the records and counts as public, so that no guarantee protects it."""


class _Private(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: bounds, the study of a fit, the trained network."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # to refuse a fit would tell that a record has a gap
        return tags

    def _fit(
        self, x: Any, y: Any, outputs: int, loss: Callable[..., Any], *, score: str, **facts: Any
    ) -> Self:
        """Train on inputs that were read, and targets as the network has them, in a study of its own."""
        import torch

        check_consistent_length(x, y)
        if "://" in (url := str(self.storage)) and masked_url(url) != url:
            allowed = "must hold no password: an estimator is shown and saved with its parameters"
            remedy = "Write it into PGPASSWORD or ~/.pgpass."
            raise InvalidInputError("storage", masked_url(url), allowed, remedy)
        budget = _budget_of(self.budget)
        strategy = self._usual if self.strategy is None else self.strategy
        count = len(x) if self.records is None else self.records
        if self.records is None:
            warnings.warn(
                f"records is not given: the number of records, {count}, sets the sampling rate and counts as "
                "public; no guarantee protects it. Pass the number that you expect.",
                PublicFactWarning,
                stacklevel=3,
            )
        records = check_integer("records", count, at_least=1, at_most=10**12)
        _check_size(len(x), records)
        check_delta(budget.delta, records, more="")
        held = _share(self.validation, records) if needs_of(strategy).score else 0
        split, batch = {"train": records - held}, self.expected_batch_size
        arm: dict[str, Any] = {
            **facts,
            "build": _build([x.shape[1], *_sizes(self.hidden), outputs], strategy),
            "loss": loss,
            "score": score if held else None,
            "data": (torch.from_numpy(self._scaled(x)).float(), torch.from_numpy(y)),
            "split": split | ({"validation": held} if held else {}),
            "strategy": strategy,
            "arm": "fit",
            "epochs": self.epochs,
            "expected_batch_size": max(1, split["train"] // _BATCHES) if batch is None else batch,
            "epsilon": budget.epsilon if self.epsilon is None else self.epsilon,
        }
        seed, name = self.random_state, f"{type(self).__name__}-{uuid.uuid4().hex[:12]}"
        if seed is not None:
            drawn = not isinstance(seed, Integral)
            seed = int(check_random_state(seed).randint(2**31 - 1) if drawn else seed)
        with closing(create_study(name, budget=budget, storage=self.storage, seed=seed)) as study:
            try:
                release = study.optimize(**arm, anyway=len(x) < _WHOLE * records)
            except UnusableRecordsError:
                study.delete()
                raise _unusable() from None
            except BaseException:
                if not study.arms:  # an arm of an open study is there from its charge on
                    study.delete()
                raise
            model = release.model
        self.study_, self.guarantee_ = name, release.guarantee
        # A release of this process reaches the study's data, which must not stay in the estimator: a copy
        # is what travels.
        self.release_ = replace(deepcopy(release), make=partial(deepcopy, model))
        # In float64 the prediction of a row hangs on no other row, up to digits that nobody reads.
        self.model_ = deepcopy(model).double()
        return self

    def _read(self, x: Any, *, reset: bool) -> Floats:
        """Return inputs as numbers; whether one of them is missing is the record's own affair."""
        read: Floats
        with _showing_nothing("X"):
            read = validate_data(self, x, reset=reset, dtype=np.float64, ensure_all_finite=False)
        return read

    def _scaled(self, x: Floats) -> Floats:
        """Return inputs clipped to their bounds, on [-1, 1]; a missing one stands in the middle."""
        low, high = _ends("bounds", self.bounds, x.shape[1])
        return np.nan_to_num((np.clip(x, low, high) - (low + high) / 2) / ((high - low) / 2))

    def _outputs(self, x: Any) -> Floats:
        import torch

        check_is_fitted(self)
        read = self._scaled(self._read(x, reset=False))
        with torch.no_grad():
            found: Floats = self.model_(torch.from_numpy(read)).numpy()
        return found


class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """A classifier that is trained under a budget: linear, or a network with ReLU.

    Every ``fit`` is charged to the ledger before it reads a record, and refused where it does not fit what
    is left: cross-validation and searches of scikit-learn's charge each of their fits. To choose
    hyperparameters, give a ``strategy``, which charges its whole search once.

    Args:
        budget: A :class:`privtune.Budget`, which has the dataset's name, or ``(epsilon, delta)`` of the one
            called ``default``. The first fit creates it; its terms never change.
        bounds: ``(low, high)`` of all features, or two arrays with those of each. Public: values outside are
            clipped, and a missing one stands in the middle.
        classes: Every class there is. Public: a record of another label adds nothing. ``"from y"`` reads
            them from the labels, takes them as public, and warns.
        hidden: Widths of hidden layers; none for a linear model.
        strategy: One of ``privtune.strategies`` that takes a build function; HyFreeDP, which needs no search,
            unless given. A search draws ``learning_rate`` from 0.05 to 5; gradients are clipped to 1 where
            neither strategy nor method says otherwise.
        epsilon: What one fit may cost, above 0; the whole budget unless given.
        epochs: Expected passes over the training records.
        expected_batch_size: Expected records in one Poisson sample; a sixteenth of them unless given.
        records: How many records there are. Public: it sets the sampling rate. The length of ``X`` unless
            given; under add-remove adjacency a number written down hides whether one record is there.
        validation: Expected share of the records on which a strategy that chooses scores its trials.
        storage: The database of studies and budgets: its URL, or the path of a SQLite file.
        random_state: Makes a fit reproducible, and its guarantee void against whoever knows it.

    Attributes:
        classes_: The classes, sorted.
        release_: The release of the fit. ``guarantee_`` is its guarantee: what this one fit cost.
        study_: Name of the fit's study, for ``privtune study show``.
        model_: The trained network, on inputs scaled to [-1, 1].
        n_features_in_, feature_names_in_: As in all estimators.

    **Guarantee**: ``guarantee_`` covers what ``fit`` leaves in the estimator. It covers no step of a pipeline
    that was fitted on the records, and no ``score`` on private ones.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> model = PrivateClassifier(
        ...     (4.0, 1e-5), bounds=(0, 8), classes=[0, 1, 2], records=150, random_state=0
        ... )
        >>> model.fit(x, y).predict(x[:1]), model.predict_proba(x).shape, model.guarantee_.epsilon <= 4.0
        (array([0]), (150, 3), True)
        >>> model.fit(x, y)
        Traceback (most recent call last):
            ...
        privtune.ledger.values.BudgetExceededError: budget 'default' (ε = 4, δ = 1e-05) does not hold ...
    """

    # The best without a search on four public tables, inputs on [-1, 1]: iris, wine, breast cancer, digits.
    _usual = InRun(arm="fit", method="hyfreedp")

    def __init__(
        self,
        budget: Budget | tuple[float, float],
        *,
        bounds: Any,
        classes: Iterable[Any] | str,
        hidden: Sequence[int] = (),
        strategy: Strategy | None = None,
        epsilon: float | None = None,
        epochs: float = 20,
        expected_batch_size: int | None = None,
        records: int | None = None,
        validation: float = 0.2,
        storage: str | Path = "sqlite:///privtune.db",
        random_state: Any = None,
    ) -> None:
        _keep(self, locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Charge the budget, train, and release the model.

        Args:
            X: Inputs, shape ``[N, n_features]``.
            y: Labels, shape ``[N]``.

        Returns:
            The estimator.

        Raises:
            BudgetExceededError: If the fit does not fit what is left. Nothing is spent.
            InvalidInputError: If a parameter is not valid. Nothing is spent.
        """
        from torch.nn.functional import cross_entropy

        x, labels = self._read(X, reset=True), column_or_1d(y, warn=True)
        classes = _classes_of(self.classes, labels)
        places = {label: place for place, label in enumerate(classes.tolist())}
        targets = np.array([places.get(label, -1) for label in labels.tolist()], dtype=np.int64)
        _check_labels(classes, labels, targets)

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model(x), y, reduction="none")

        self._fit(x, targets, len(places), loss, score="accuracy", classes=len(places))
        self.classes_ = classes
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the most probable class of each row.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Labels, shape ``[N]``.
        """
        outputs = self._outputs(X)
        found: npt.NDArray[Any] = self.classes_[outputs.argmax(axis=1)]
        return found

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class, in the order of ``classes_``.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Shape ``[N, n_classes]``; rows sum to 1.
        """
        outputs = self._outputs(X)
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        shares: Floats = powers / powers.sum(axis=1, keepdims=True)
        return shares


class PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """A regression by least squares that is trained under a budget: linear, or a network with ReLU.

    It is charged, refused and guaranteed as :class:`PrivateClassifier`.

    Args:
        budget, bounds, hidden: As there.
        target_range: ``(low, high)`` of the target. Public: targets outside are clipped, and so are
            predictions.
        strategy: As there; DP-SGD with the learning rate 0.1 unless given.
        epsilon, epochs, expected_batch_size, records, validation, storage, random_state: As there.

    Attributes:
        release_, guarantee_, study_, n_features_in_, feature_names_in_: As there.
        model_: The trained network, on inputs and with a target scaled to [-1, 1].

    Example:
        >>> import numpy as np
        >>> x = np.linspace(0, 1, 500)[:, None]
        >>> model = PrivateRegressor(
        ...     (8.0, 1e-5), bounds=(0, 1), target_range=(0, 3), records=500, random_state=0
        ... )
        >>> model = model.fit(x, 2 * x[:, 0])
        >>> 0.8 < model.predict([[0.5]]).item() < 1.2, model.score(x, 2 * x[:, 0]) > 0.9  # made-up records
        (True, True)
    """

    # Above HyFreeDP on three public tables, inputs and target on [-1, 1]: diabetes, Friedman 1, a linear one.
    _usual = Fixed(arm="fit", parameters={"learning_rate": 0.1})

    def __init__(
        self,
        budget: Budget | tuple[float, float],
        *,
        bounds: Any,
        target_range: tuple[float, float],
        hidden: Sequence[int] = (),
        strategy: Strategy | None = None,
        epsilon: float | None = None,
        epochs: float = 20,
        expected_batch_size: int | None = None,
        records: int | None = None,
        validation: float = 0.2,
        storage: str | Path = "sqlite:///privtune.db",
        random_state: Any = None,
    ) -> None:
        _keep(self, locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Charge the budget, train, and release the model: as that of the classifier.

        Args:
            X: Inputs, shape ``[N, n_features]``.
            y: Targets, shape ``[N]``.

        Returns:
            The estimator.

        Raises:
            BudgetExceededError: If the fit does not fit what is left. Nothing is spent.
            InvalidInputError: If a parameter is not valid. Nothing is spent.
        """
        x = self._read(X, reset=True)
        with _showing_nothing("y"):
            found = column_or_1d(y, warn=True).astype(np.float64)
        middle, half = self._target()

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            errors: torch.Tensor = model(x)[:, 0] - y
            return errors.square()

        targets = np.clip((found - middle) / half, -1.0, 1.0).astype(np.float32)
        return self._fit(x, targets, 1, loss, score="mse", target_range=(-1.0, 1.0))

    def predict(self, X: Any) -> Floats:
        """Return the target of each row, within its range.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Shape ``[N]``.
        """
        outputs = self._outputs(X)
        middle, half = self._target()
        return middle + half * np.clip(outputs[:, 0], -1.0, 1.0)

    def _target(self) -> tuple[float, float]:
        low, high = _ends("target_range", self.target_range, 1)
        return float(low[0] + high[0]) / 2, float(high[0] - low[0]) / 2


@contextmanager
def _showing_nothing(name: str) -> Iterator[None]:
    """Refuse texts in the place of numbers, whose error by NumPy shows one of them."""
    try:
        yield
    except ValueError as error:
        if "could not convert" not in str(error):
            raise
        allowed = "must be numbers; encode texts before by a list that is public"
        raise InvalidInputError(name, "texts", allowed) from None


def _keep(estimator: object, given: Mapping[str, Any]) -> None:
    """Keep parameters as they are given, as scikit-learn asks: ``fit`` checks them."""
    for name in given.keys() - {"self", "__class__"}:
        setattr(estimator, name, given[name])


def _build(sizes: Sequence[int], strategy: Strategy) -> Callable[[Trial], Any]:
    """Return what builds a candidate: a network of these widths, and what its method leaves open."""
    from torch import nn

    from privtune.tasks import Candidate

    needed = method_class(getattr(strategy, "method", "dpsgd")).parameters
    fixed = "max_grad_norm" in getattr(strategy, "parameters", {})
    norm = 1.0 if "max_grad_norm" in needed and not fixed else None

    def build(trial: Trial) -> Candidate:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if "learning_rate" in needed:
            trial.suggest_float("learning_rate", *_RATES, log=True)
        if "max_grad_norm" in needed and fixed:
            trial.suggest_float("max_grad_norm", *_NORMS, log=True)
        return Candidate(nn.Sequential(*layers[:-1]), max_grad_norm=norm)

    return build


def _budget_of(given: Any) -> Budget:
    if isinstance(given, Budget):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        allowed = "must be a privtune.Budget, or (epsilon, delta)"
        raise InvalidInputError(
            "budget", given, allowed, "Budget(4.0, 1e-5, name='clinic') is one."
        )
    return Budget(*given)


def _ends(name: str, given: Any, features: int) -> tuple[Floats, Floats]:
    """Return both ends of each feature."""
    allowed = f"must be (low, high), numbers or arrays of {features}, low < high and finite"
    try:
        low, high = (np.broadcast_to(np.asarray(end, dtype=float), (features,)) for end in given)
    except (TypeError, ValueError):
        raise InvalidInputError(name, given, allowed) from None
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise InvalidInputError(name, given, allowed)
    return low, high


def _classes_of(given: Any, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the declared classes, sorted; those of the labels if that is declared."""
    if isinstance(given, str) and given == FROM_Y:
        warnings.warn(
            "classes='from y': which labels occur is read from y and taken as public; no guarantee "
            "protects it. Pass the list of all classes.",
            PublicFactWarning,
            stacklevel=3,
        )
        check_classification_targets(y)
        given = y
    elif isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidInputError("classes", given, f"must list every class, or be {FROM_Y!r}")
    found: npt.NDArray[Any] = np.unique(np.asarray(list(given)))
    if len(found) < 2:
        allowed = "must be two or more, and there is one class alone"
        raise InvalidInputError("classes", found.tolist(), allowed)
    return found


def _check_labels(
    classes: npt.NDArray[Any], labels: npt.NDArray[Any], targets: npt.NDArray[np.int64]
) -> None:
    """Refuse classes that most labels are none of, whose records would add nothing."""
    if 2 * int((targets < 0).sum()) <= len(targets):
        return
    texts = {str(label) for label in classes.tolist()}
    same = 2 * sum(str(label) in texts for label in labels.tolist()) > len(labels)
    remedy = "List every label as y has it."
    if same:  # "0" is no 0
        remedy = (
            "They are of another type: list texts as texts, as in classes=['0', '1'], or convert y."
        )
    allowed = "must be the labels of y, and most of those are none of these"
    raise InvalidInputError("classes", classes.tolist(), allowed, remedy)


def _check_size(rows: int, records: int) -> None:
    """Refuse far fewer rows than are declared; a fold of a cross-validation has some of them."""
    if rows >= _LEAST * records:
        return
    raise InvalidInputError(
        "records",
        records,
        "must be about the number of rows of X, and X has less than a fifth of that",
        "Correct it. Of folds that are so small, write down the number of a fold.",
    )


def _unusable() -> InvalidInputError:
    """Return the error of records that do not fit what is declared, as far as it may be told."""
    return InvalidInputError(
        "X and y",
        "these records",
        "do not fit what is declared of them, so a fit would spend the budget for nothing: most records "
        "are alike, or have one class",
        "Compare them with bounds, classes and records. Nothing was charged.",
    )


def _sizes(hidden: Any) -> list[int]:
    if isinstance(hidden, str) or not isinstance(hidden, Iterable):
        raise InvalidInputError(
            "hidden", hidden, "must list widths of layers, as (64,); () for none"
        )
    return [check_integer("hidden", width, at_least=1, at_most=10**6) for width in hidden]


def _share(share: float, records: int) -> int:
    """Return how many records a share of them is, of which the others are left."""
    if not 0 < share < 1 or not 1 <= (held := round(share * records)) < records:
        allowed = (
            "must be a share of the records above 0 and below 1 that leaves some on both sides"
        )
        raise InvalidInputError("validation", share, allowed)
    return held
