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

from privtune.accounting.checks import check_integer, check_number
from privtune.api import create_study, make_task
from privtune.errors import InvalidInputError
from privtune.imports import find_extra
from privtune.ledger import Budget, Dataset
from privtune.ledger.urls import masked_url
from privtune.names import usual_storage
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
_LEAST_SHARE = 0.2  # of the declared records: what a fold has at least
_FOLD_BELOW = 0.8  # of the declared records: fewer rows are a fold of a cross-validation
_BATCHES = 16  # expected batches of an epoch
_RATES = (0.05, 5.0)  # of a strategy that searches, for inputs in [-1, 1]
_NORMS = (0.1, 10.0)

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[Any]  # of any type


class PublicFactWarning(UserWarning):
    """A fact was read from the records and counts as public, so that no guarantee protects it."""


_REPLACEMENTS: Mapping[str, str] = {
    "partial_fit": "each fit is a charge of its own, so that none goes on with another: give epochs, and "
    "call fit once",
    "predict_proba": "a regression says numbers, by predict; probabilities are a PrivateClassifier's",
    "predict_log_proba": "it is numpy.log of predict_proba, which a PrivateClassifier has",
    "feature_importances_": "it is of trees; a linear model has coef_",
}
"""Names of scikit-learn's other estimators, each with what there is in its place."""


class _Private(BaseEstimator):  # type: ignore[misc]
    """The common base of both estimators: bounds, the study of a fit, the trained network."""

    if not TYPE_CHECKING:  # a type checker goes on refusing what is not there

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that failed: the error is its own
                return object.__getattribute__(self, name)
            if name in _REPLACEMENTS:
                raise AttributeError(f"{name}: {_REPLACEMENTS[name]}.")
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # to refuse a fit would tell that a record has a gap
        return tags

    def _split(self, strategy: Any, records: int) -> dict[str, int]:
        """Return the expected number of records of each split, by its name, without empty splits."""
        validation = 0
        if needs_of(strategy).score:
            validation = _share("validation", self.validation, records)
        test = 0
        test_share = getattr(self, "test", 0.0)
        if test_share:
            test = _share("test", test_share, records)
        train = records - validation - test
        if train <= 0:
            allowed = "must leave records to train on, beside validation"
            remedy = "Make one of the two shares smaller."
            raise InvalidInputError("test", test_share, allowed, remedy)
        parts = {"train": train, "validation": validation, "test": test}
        return {name: size for name, size in parts.items() if size}

    def _fit(
        self,
        x: Any,
        y: Any,
        outputs: int,
        loss: Callable[..., Any],
        *,
        score: str,
        **facts: Any,
    ) -> Self:
        """Train a network in a new study, which charges the budget, and set the fitted attributes.

        Args:
            x: Inputs, shape ``[N, n_features]``, not scaled yet.
            y: Targets, shape ``[N]``.
            outputs: The network's outputs.
            loss: Of a model on a batch: the loss of each record.
            score: What a strategy that chooses scores its trials by.
            **facts: What is public of the target, as :func:`privtune.make_task` takes it.
        """
        import torch

        check_consistent_length(x, y)
        _check_storage(self.storage)
        budget = _check_budget(self.budget)
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
        split = self._split(strategy, records)
        widths = [x.shape[1], *_widths(self.hidden), outputs]
        inputs = torch.from_numpy(self._scaled(x)).float()
        targets = torch.from_numpy(y)
        task = make_task(
            _build(widths, strategy),
            **facts,
            loss=loss,
            score=score if "validation" in split else None,
            data=(inputs, targets),
            split=split,
        )
        # Names of columns, of a DataFrame, tell two datasets that are given to one budget.
        columns = tuple(getattr(self, "feature_names_in_", ()))
        task = replace(task, dataset=Dataset(columns=columns))
        arm: dict[str, Any] = {
            "strategy": strategy,
            "arm": "fit",
            "epochs": self.epochs,
            "expected_batch_size": self._batch(split["train"]),
            "epsilon": budget.epsilon if self.epsilon is None else self.epsilon,
        }
        identifier = uuid.uuid4().hex[:12]
        name = f"{type(self).__name__}-{identifier}"
        seed = _seed_of(self.random_state)
        is_fold = len(x) < _FOLD_BELOW * records
        terms: dict[str, Any] = {
            "budget": budget,
            "storage": self.storage,
            "tracking": self.tracking,
            "compute": self.compute,
        }
        with closing(create_study(name, **terms, seed=seed)) as study:
            try:
                release = study.optimize(task, **arm, force=is_fold)
            except UnusableRecordsError:
                study.delete()
                raise _unusable_records() from None
            except BaseException:
                if not study.arms:  # an arm of an open study is there from its charge on
                    study.delete()
                raise
            model = release.model
        self.study_ = name
        self.guarantee_ = release.guarantee
        # A release of this process reaches the study's data, which must not stay in the estimator: a copy
        # is what travels.
        self.release_ = replace(deepcopy(release), make=partial(deepcopy, model))
        # In float64 the prediction of a row hangs on no other row, up to digits that nobody reads.
        self.model_ = deepcopy(model).double()
        return self

    def _batch(self, records: int) -> int | str:
        """Return the expected batch of so many training records: as given, chosen with epochs, or usual."""
        batch: int | str | None = self.expected_batch_size
        if batch is not None:
            return batch
        return "auto" if self.epochs == "auto" else max(1, records // _BATCHES)

    def _read(self, x: Any, *, reset: bool) -> Floats:
        """Return inputs as an array of numbers, rows by columns, in which some may be missing."""
        axes = len(getattr(x, "shape", (0, 0)))
        if axes != 2:  # scikit-learn's own sentence shows the records
            allowed = "must have two: rows and columns"
            remedy = "Reshape your data: X.reshape(-1, 1) is one column."
            raise InvalidInputError("axes of X", axes, allowed, remedy)
        inputs: Floats
        with _showing_nothing("X"):
            inputs = validate_data(self, x, reset=reset, dtype=np.float64, ensure_all_finite=False)
        return inputs

    def _scaled(self, x: Floats) -> Floats:
        """Return inputs clipped to their bounds and scaled to [-1, 1]; a missing number becomes 0."""
        low, high = _check_bounds("bounds", self.bounds, x.shape[1])
        middle = (low + high) / 2
        half = (high - low) / 2
        distances = np.clip(x, low, high) - middle
        scaled = distances / half
        return np.nan_to_num(scaled)

    def _outputs(self, x: Any) -> Floats:
        """Return the network's outputs for unscaled inputs, shape ``[N, outputs]``."""
        import torch

        check_is_fitted(self)
        x = self._read(x, reset=False)
        inputs = self._scaled(x)
        with torch.no_grad():
            outputs: Floats = self.model_(torch.from_numpy(inputs)).numpy()
        return outputs

    def _linear(self, name: str) -> tuple[Floats, Floats]:
        """Return weights ``[outputs, n_features]`` and biases of a linear model, for unscaled inputs."""
        check_is_fitted(self)
        layers: Any = self.model_
        if len(layers) != 1:
            raise AttributeError(
                f"{name} is of linear models: this one has hidden layers, and model_ is its network"
            )
        weight: Floats = layers[0].weight.detach().numpy()
        bias: Floats = layers[0].bias.detach().numpy()
        low, high = _check_bounds("bounds", self.bounds, weight.shape[1])
        half = (high - low) / 2
        middle = (low + high) / 2
        slopes = weight / half
        return slopes, bias - slopes @ middle


class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """A classifier that is trained under a budget: linear, or a network with ReLU.

    Every ``fit`` is charged to the ledger before it reads a record, and refused where it does not fit what
    is left: cross-validation and searches of scikit-learn's charge each of their fits. To choose
    hyperparameters, give a ``strategy``, which charges its whole search once.

    Args:
        budget: A :class:`privtune.Budget`, named for the dataset: every dataset has one of its own. The
            first fit creates it; its terms never change.
        bounds: ``(low, high)`` of all features, or two arrays with those of each. Public: values outside are
            clipped, and a missing one stands in the middle.
        classes: Every class there is. Public: a record of another label adds nothing. ``"from y"`` reads
            them from the labels, takes them as public, and warns.
        hidden: Widths of hidden layers; none for a linear model.
        class_weight: Weights of the records' losses by class, as ``{0: 1, 1: 10}``: public numbers above 0; a
            class that is left out has weight 1. They are divided by the largest before each gradient is
            clipped, so that one record counts no more than without. ``"balanced"``, which counts the
            records of each class, is refused. A method that makes all gradients equally long is refused,
            too; DP-SGD with the learning rate 1 trains unless a ``strategy`` is given.
        strategy: One of ``privtune.strategies`` that takes a build function; HyFreeDP, which needs no search,
            unless given. A search draws ``learning_rate`` from 0.05 to 5; gradients are clipped to 1 where
            neither strategy nor method says otherwise.
        epsilon: What one fit may cost, above 0; the whole budget unless given.
        epochs: Expected passes over the training records; ``auto``: planning chooses them, and the batch
            unless that is given.
        expected_batch_size: Expected records in one Poisson sample; a sixteenth of them unless given.
        compute: What one fit may spend where epochs are ``auto``, as :func:`privtune.create_study` has it.
        records: How many records there are. Public: it sets the sampling rate. The length of ``X`` unless
            given; under add-remove adjacency a number written down hides whether one record is there.
        validation: Expected share of the records on which a strategy that chooses scores its trials.
        test: Expected share of the records that are kept from training, to measure the trained model's
            accuracy on them and to fit a temperature of its probabilities. The accuracy is noised, part of
            the charge of the fit, and stands with its 95% interval in ``release_.estimates``. A share so
            small that the interval would say little is left unmeasured, with a warning in the log. No
            record unless given.
        storage: The database of studies and budgets, as :func:`privtune.create_study` takes it.
        tracking: ``mlflow``: log the release of each fit, as :func:`privtune.create_study` does.
        random_state: Makes a fit reproducible, and its guarantee void against whoever knows it.

    Attributes:
        classes_: The classes, sorted.
        coef_, intercept_: Of a linear model, for inputs within their bounds as they are given: shapes
            ``[1, n_features]`` and ``[1]`` for two classes, else ``[n_classes, n_features]`` and
            ``[n_classes]``.
        release_: The release of the fit. ``guarantee_`` is its guarantee: what this one fit cost.
        study_: Name of the fit's study, for ``privtune study show``.
        model_: The trained network, on inputs scaled to [-1, 1].
        n_features_in_, feature_names_in_: As in all estimators.

    **Guarantee**: ``guarantee_`` covers what ``fit`` leaves in the estimator. It covers no step of a pipeline
    that was fitted on the records, and no ``score`` on private ones.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> iris = Budget(4.0, 1e-5, name="iris")
        >>> model = PrivateClassifier(
        ...     iris, bounds=(0, 8), classes=[0, 1, 2], records=150, random_state=0
        ... )
        >>> model.fit(x, y).predict(x[:1]), model.predict_proba(x).shape, model.guarantee_.epsilon <= 4.0
        (array([0]), (150, 3), True)
        >>> model.fit(x, y)
        Traceback (most recent call last):
            ...
        privtune.ledger.values.BudgetExceededError: budget 'iris' (ε = 4, δ = 1e-05) has no room ...
    """

    # The best without a search on four public tables, inputs on [-1, 1]: iris, wine, breast cancer, digits.
    _unweighted = InRun(arm="fit", method="hyfreedp")
    _weighted = Fixed(arm="fit", parameters={"learning_rate": 1.0})

    def __init__(
        self,
        budget: Budget,
        *,
        bounds: Any,
        classes: Iterable[Any] | str,
        hidden: Sequence[int] = (),
        class_weight: Mapping[Any, float] | None = None,
        strategy: Strategy | None = None,
        epsilon: float | None = None,
        epochs: float | str = 20,
        expected_batch_size: int | str | None = None,
        compute: float | str | None = None,
        records: int | None = None,
        validation: float = 0.2,
        test: float = 0.0,
        storage: str | Path | None = None,
        tracking: str | None = None,
        random_state: Any = None,
    ) -> None:
        _store_parameters(self, locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Charge the budget, train the classifier, and release it.

        Args:
            X: Inputs, shape ``[N, n_features]``.
            y: Labels, shape ``[N]``.

        Returns:
            The estimator.

        Raises:
            BudgetExceededError: If the fit does not fit what is left. Nothing is spent.
            InvalidInputError: If a parameter is not valid. Nothing is spent.
        """
        import torch
        from torch.nn.functional import cross_entropy

        x = self._read(X, reset=True)
        labels = column_or_1d(y, warn=True)
        classes = _check_classes(self.classes, labels)
        places: dict[Any, int] = {}
        for place, label in enumerate(classes.tolist()):
            places[label] = place
        places_of_records = [places.get(label, -1) for label in labels.tolist()]
        targets = np.array(places_of_records, dtype=np.int64)
        _check_labels(classes, labels, targets)
        weights = _check_weights(self.class_weight, classes, self.strategy)
        weight: torch.Tensor | None = None
        if weights is not None:
            weight = torch.from_numpy(weights).float()

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model(x), y, weight, reduction="none")

        count = len(places)
        self._fit(x, targets, count, loss, score="accuracy", classes=count)
        self.classes_ = classes
        return self

    @property
    def _usual(self) -> Strategy:
        """The strategy used by default: one for classes of equal weight, another one for weighted classes."""
        return self._unweighted if self.class_weight is None else self._weighted

    @property
    def coef_(self) -> Floats:
        """Weights of the features in :meth:`decision_function`; a linear model alone has them."""
        weights, _ = self._linear("coef_")
        if len(weights) > 2:
            return weights
        # Of two classes scikit-learn has one function: how far the second one is ahead.
        return weights[1:] - weights[:1]

    @property
    def intercept_(self) -> Floats:
        """Constant terms of :meth:`decision_function`; a linear model alone has them."""
        _, biases = self._linear("intercept_")
        if len(biases) > 2:
            return biases
        return biases[1:] - biases[:1]

    def decision_function(self, X: Any) -> Floats:
        """Return the network's output for each class; of two classes, how far the second one is ahead.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Of two classes shape ``[N]``, above 0 for the second one; else ``[N, n_classes]``, largest for
            the class that is predicted.

        Example:
            >>> x, y = np.array([[0.0], [1.0]] * 50), np.array(["no", "yes"] * 50)
            >>> budget = Budget(4.0, 1e-5, name="decisions")
            >>> facts = {"bounds": (0, 1), "classes": ["no", "yes"], "records": 100}
            >>> model = PrivateClassifier(budget, **facts, random_state=0).fit(x, y)
            >>> model.decision_function([[1.0]]) > 0, model.predict([[1.0]])
            (array([ True]), array(['yes'], dtype='<U3'))
        """
        outputs = self._outputs(X)
        if outputs.shape[1] > 2:
            return outputs
        ahead: Floats = outputs[:, 1] - outputs[:, 0]
        return ahead

    def predict(self, X: Any) -> Labels:
        """Return the most probable class of each row.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Labels, shape ``[N]``.
        """
        outputs = self._outputs(X)
        places = outputs.argmax(axis=1)
        labels: Labels = self.classes_[places]
        return labels

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class, in the order of ``classes_``.

        Without ``test`` they are the softmax as it was trained, which noise in the weights makes
        too sure.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Shape ``[N, n_classes]``; rows sum to 1.
        """
        outputs = self._outputs(X)  # refuses an estimator that is not fitted
        outputs = outputs / (self.release_.temperature or 1.0)
        largest = outputs.max(axis=1, keepdims=True)
        powers = np.exp(outputs - largest)  # at most 1: none overflows
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
        epsilon, epochs, expected_batch_size, compute, records: As there.
        validation, storage, tracking, random_state: As there.

    Attributes:
        release_, guarantee_, study_, n_features_in_, feature_names_in_: As there.
        coef_, intercept_: Of a linear model, shape ``[n_features]`` and a number, for inputs within their
            bounds and a target as they are given.
        model_: The trained network, on inputs and with a target scaled to [-1, 1].

    Example:
        >>> import numpy as np
        >>> x = np.linspace(0, 1, 500)[:, None]
        >>> line = Budget(8.0, 1e-5, name="line")
        >>> model = PrivateRegressor(
        ...     line, bounds=(0, 1), target_range=(0, 3), records=500, random_state=0
        ... )
        >>> model = model.fit(x, 2 * x[:, 0])
        >>> 0.8 < model.predict([[0.5]]).item() < 1.2, model.score(x, 2 * x[:, 0]) > 0.9  # made-up records
        (True, True)
    """

    # Above HyFreeDP on three public tables, inputs and target on [-1, 1]: diabetes, Friedman 1, a linear one.
    _usual = Fixed(arm="fit", parameters={"learning_rate": 0.1})

    def __init__(
        self,
        budget: Budget,
        *,
        bounds: Any,
        target_range: tuple[float, float],
        hidden: Sequence[int] = (),
        strategy: Strategy | None = None,
        epsilon: float | None = None,
        epochs: float | str = 20,
        expected_batch_size: int | str | None = None,
        compute: float | str | None = None,
        records: int | None = None,
        validation: float = 0.2,
        storage: str | Path | None = None,
        tracking: str | None = None,
        random_state: Any = None,
    ) -> None:
        _store_parameters(self, locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Charge the budget, train the model of a regression, and release it.

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
            values = column_or_1d(y, warn=True).astype(np.float64)
        middle, half = self._target()

        def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            errors: torch.Tensor = model(x)[:, 0] - y
            return errors.square()

        scaled = (values - middle) / half
        targets = np.clip(scaled, -1.0, 1.0).astype(np.float32)
        return self._fit(x, targets, 1, loss, score="mse", target_range=(-1.0, 1.0))

    @property
    def coef_(self) -> Floats:
        """Weights of the features in a prediction; a linear model alone has them."""
        _, half = self._target()
        weights, _ = self._linear("coef_")
        slopes: Floats = half * weights[0]
        return slopes

    @property
    def intercept_(self) -> float:
        """The prediction where all features are 0; a linear model alone has it."""
        middle, half = self._target()
        _, biases = self._linear("intercept_")
        return float(middle + half * biases[0])

    def predict(self, X: Any) -> Floats:
        """Return the target of each row, within its range.

        Args:
            X: Inputs, shape ``[N, n_features]``.

        Returns:
            Shape ``[N]``.
        """
        outputs = self._outputs(X)
        middle, half = self._target()
        targets = np.clip(outputs[:, 0], -1.0, 1.0)
        return middle + half * targets

    def _target(self) -> tuple[float, float]:
        """Return the middle and the half-width of the target's range."""
        lows, highs = _check_bounds("target_range", self.target_range, 1)
        low = lows[0]
        high = highs[0]
        middle = float(low + high) / 2
        half = float(high - low) / 2
        return middle, half


@contextmanager
def _showing_nothing(name: str) -> Iterator[None]:
    """Replace NumPy's errors about inputs that are no numbers: they would show a value of the records."""
    try:
        yield
    except ValueError as error:
        if "Expected 2D array" in str(error):
            allowed = "must be rows of as many numbers each"
            raise InvalidInputError(name, "a list", allowed, "Reshape your data.") from None
        if "could not convert" not in str(error):
            raise
        allowed = "must be numbers; encode texts before by a list that is public"
        raise InvalidInputError(name, "texts", allowed) from None


def _store_parameters(estimator: object, variables: Mapping[str, Any]) -> None:
    """Store an estimator's parameters unchecked, as scikit-learn asks: ``fit`` checks them.

    Args:
        estimator: The estimator.
        variables: The local variables of its ``__init__``.
    """
    for name in variables.keys() - {"self", "__class__"}:
        setattr(estimator, name, variables[name])


def _build(widths: Sequence[int], strategy: Strategy) -> Callable[[Trial], Any]:
    """Return the function that builds a trial's candidate: a network with the given widths of layers."""
    from torch import nn

    from privtune.tasks import Candidate

    method = method_class(getattr(strategy, "method", "dpsgd"))
    has_rate = "learning_rate" in method.parameters
    has_norm = "max_grad_norm" in method.parameters
    is_set = "max_grad_norm" in getattr(strategy, "parameters", {})
    norm = 1.0 if has_norm and not is_set else None

    def build(trial: Trial) -> Candidate:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers.append(nn.Linear(inputs, outputs))
            layers.append(nn.ReLU())
        if has_rate:
            trial.suggest_float("learning_rate", *_RATES, log=True)
        if has_norm and is_set:
            trial.suggest_float("max_grad_norm", *_NORMS, log=True)
        network = nn.Sequential(*layers[:-1])  # no ReLU behind the outputs
        return Candidate(network, max_grad_norm=norm)

    return build


def _check_storage(storage: str | Path | None) -> None:
    """Refuse a database URL with a password, which an estimator's ``repr`` and pickles would show."""
    # None is no parameter to show: the environment's URL stays there.
    url = "" if storage is None else str(usual_storage(storage))
    if "://" not in url:
        return
    masked = masked_url(url)
    if masked != url:
        allowed = "must hold no password: an estimator is shown and saved with its parameters"
        remedy = "Write it into PGPASSWORD or ~/.pgpass."
        raise InvalidInputError("storage", masked, allowed, remedy)


def _seed_of(random_state: Any) -> int | None:
    """Return the seed of a fit; from a random generator, draw it as its next integer."""
    if random_state is None:
        return None
    if isinstance(random_state, Integral):
        return int(random_state)
    generator = check_random_state(random_state)
    return int(generator.randint(2**31 - 1))


def _check_budget(budget: Any) -> Budget:
    """Return the budget if it is a :class:`Budget`: a pair of numbers would not name its dataset."""
    if isinstance(budget, Budget):
        return budget
    allowed = "must be a privtune.Budget, whose name says which dataset's it is"
    epsilon, delta = budget if _is_pair(budget) else (4.0, 1e-5)
    remedy = f"privtune.Budget({epsilon}, {delta}, name='clinic') is one."
    raise InvalidInputError("budget", budget, allowed, remedy)


def _check_bounds(
    name: str,
    bounds: Any,
    features: int,
) -> tuple[Floats, Floats]:
    """Return the low and the high end of each feature, arrays of shape ``[features]``.

    Args:
        name: What the bounds are called in a refusal.
        bounds: Two numbers, or two arrays of as many as there are features.
        features: How many there are.
    """
    allowed = f"must be (low, high), numbers or arrays of {features}, low < high and finite"
    try:
        low, high = (_spread(end, features) for end in bounds)
    except (TypeError, ValueError):
        remedy = ""
        entries = bounds if isinstance(bounds, list | tuple) else [bounds]
        if all(_is_pair(entry) for entry in entries):
            remedy = "Of pairs for each column give all low ends, then all high ones: zip(*pairs)."
        raise InvalidInputError(name, bounds, allowed, remedy) from None
    is_finite = np.isfinite(low).all() and np.isfinite(high).all()
    if not is_finite or not (low < high).all():
        remedy = "Exchange the two." if (high < low).all() else ""
        raise InvalidInputError(name, bounds, allowed, remedy)
    return low, high


def _spread(end: Any, features: int) -> Floats:
    """Return the low or high ends of all features, shape ``[features]``, from one number or an array."""
    values = np.asarray(end, dtype=float)
    return np.broadcast_to(values, (features,))


def _is_pair(value: object) -> bool:
    """Return whether a value is a list or tuple of length two, such as the ends of a range."""
    return isinstance(value, list | tuple) and len(value) == 2


def _check_classes(classes: Any, y: Labels) -> Labels:
    """Return the declared classes, sorted, or the classes of ``y`` if ``from y`` is declared."""
    if isinstance(classes, str) and classes == FROM_Y:
        warnings.warn(
            "classes='from y': which labels occur is read from y and taken as public; no guarantee "
            "protects it. Pass the list of all classes.",
            PublicFactWarning,
            stacklevel=3,
        )
        check_classification_targets(y)
        classes = y
    elif isinstance(classes, str) or not isinstance(classes, Iterable):
        remedy = "classes=[0, 1] lists two." if isinstance(classes, int) else ""
        allowed = f"must list every class, or be {FROM_Y!r}"
        raise InvalidInputError("classes", classes, allowed, remedy)
    values = np.asarray(list(classes))
    labels: Labels = np.unique(values)
    if len(labels) < 2:
        allowed = "must be two or more, and there is one class alone"
        raise InvalidInputError("classes", labels.tolist(), allowed)
    return labels


def _check_weights(
    class_weight: Any,
    classes: Labels,
    strategy: Strategy | None,
) -> Floats | None:
    """Return the weight of each class, the largest 1, shape ``[classes]``; None where all are alike.

    Args:
        class_weight: As the estimator has it: weights by label; a label without one has weight 1.
        classes: The declared labels.
        strategy: Of the estimator; one that makes all gradients equally long takes no weights.
    """
    if class_weight is None:
        return None
    if isinstance(class_weight, str):
        allowed = "must list a public weight for each class, as {0: 1, 1: 10}"
        remedy = "Write down the weights that you expect."
        if class_weight == "balanced":
            allowed += (
                ": balanced weights are counts of private records, which nothing here pays for"
            )
        raise InvalidInputError("class_weight", class_weight, allowed, remedy)
    if not isinstance(class_weight, Mapping):
        allowed = "must map classes to weights, or be None"
        raise InvalidInputError("class_weight", class_weight, allowed)
    labels = classes.tolist()
    unknown = [label for label in class_weight if label not in labels]
    if unknown:
        names = ", ".join(map(repr, labels))
        raise InvalidInputError("class_weight", unknown, f"must be classes, which are {names}")
    weights: list[float] = []
    for label in labels:
        weight = class_weight.get(label, 1.0)
        weights.append(check_number("class_weight", weight, above=0.0))
    cause = "" if strategy is None else _equal_gradients(strategy)
    if cause:
        raise InvalidInputError(
            "class_weight",
            class_weight,
            f"changes nothing where the gradients of all records are made equally long, as {cause}",
            "Leave strategy out, or give one that clips, as privtune.strategies.Fixed().",
        )
    largest = max(weights)
    values: Floats = np.array(weights) / largest
    return values


def _equal_gradients(strategy: Strategy) -> str:
    """Return which method of a strategy gives all gradients one length, in words; empty if none does."""
    method = getattr(strategy, "method", None)
    if method is None:  # one that chooses its method
        return f"a method does that {strategy.name} may choose"
    if not method_class(method).normalises:
        return ""
    options = getattr(strategy, "options", {})
    clips = options.get("max_grad_norm") is not None
    return "" if clips else f"{method} does"


def _check_labels(
    classes: Labels,
    labels: Labels,
    targets: npt.NDArray[np.int64],
) -> None:
    """Refuse declared classes to which most labels do not belong.

    Args:
        classes: The declared labels.
        labels: Those of the records.
        targets: The place of each record's label among the classes, -1 for one that is none of them.
    """
    strangers = int((targets < 0).sum())
    if 2 * strangers <= len(targets):
        return
    texts = {str(label) for label in classes.tolist()}
    namesakes = sum(str(label) in texts for label in labels.tolist())
    remedy = "List every label as y has it."
    if 2 * namesakes > len(labels):  # "0" is no 0
        remedy = (
            "They are of another type: list texts as texts, as in classes=['0', '1'], or convert y."
        )
    allowed = "must be the labels of y, and most of those are none of these"
    raise InvalidInputError("classes", classes.tolist(), allowed, remedy)


def _check_size(rows: int, records: int) -> None:
    """Refuse inputs with far fewer rows than the declared number of records."""
    if rows >= _LEAST_SHARE * records:
        return
    raise InvalidInputError(
        "records",
        records,
        "must be about the number of rows of X, and X has less than a fifth of that",
        "Correct it. Of folds that are so small, write down the number of a fold.",
    )


def _unusable_records() -> InvalidInputError:
    """Return the error for records that contradict the declared facts, without telling which ones."""
    return InvalidInputError(
        "X and y",
        "these records",
        "do not fit what is declared of them, so a fit would spend the budget for nothing: most records "
        "are alike, or have one class",
        "Compare them with bounds, classes and records. Nothing was charged.",
    )


def _widths(hidden: Any) -> list[int]:
    """Return the widths of the hidden layers."""
    if isinstance(hidden, str) or not isinstance(hidden, Iterable):
        allowed = "must list widths of layers, as (64,); () for none"
        raise InvalidInputError("hidden", hidden, allowed)
    return [check_integer("hidden", width, at_least=1, at_most=10**6) for width in hidden]


def _share(name: str, share: float, records: int) -> int:
    """Return how many records a share is; refuse a share that is empty or leaves no record.

    Args:
        name: What the share is of, for the refusal.
        share: Above 0 and below 1.
        records: How many records there are.
    """
    size = 0
    if 0 < share < 1:
        size = round(share * records)
    if not 1 <= size < records:
        allowed = (
            "must be a share of the records above 0 and below 1 that leaves some on both sides"
        )
        raise InvalidInputError(name, share, allowed)
    return size
