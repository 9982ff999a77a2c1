"""Events that tune: the best of several runs, the first past a threshold, tuning on a subset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from privtune.accounting._checks import check_integer, check_number
from privtune.accounting.algebra import Event, check_event, set_field
from privtune.accounting.run_law import RunLaw
from privtune.errors import InvalidInputError

__all__ = ["PrivateSelection", "SubsampledTuning", "ThresholdSelection"]


@dataclass(frozen=True)
class PrivateSelection(Event):
    """The best of K independent runs of one mechanism, K drawn from a public law and kept secret.

    Args:
        event: One run, its score included.
        runs: The law of K.

    Raises:
        InvalidInputError: `runs` is no law.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PoissonSampled, Repeated, epsilon
        >>> run = Repeated(1000, PoissonSampled(0.01, Gaussian(2.0)))
        >>> best = PrivateSelection(run, Geometric(mean=10))
        >>> ratio = epsilon(best, 1e-5).epsilon / epsilon(run, 1e-5).epsilon
        >>> 1 < ratio < 3.5  # ten runs, all shown, would cost more
        True
    """

    type: ClassVar[str] = "private_selection"
    event: Event
    runs: RunLaw

    def __post_init__(self) -> None:
        check_event("event", self.event)
        if not isinstance(self.runs, RunLaw):
            raise InvalidInputError("runs", self.runs, "must be a law of the number of runs")


@dataclass(frozen=True)
class ThresholdSelection(Event):
    """Run one mechanism until a score reaches a known threshold; give up at random.

    After each run below the threshold the procedure stops with a public probability and releases a
    fixed symbol. Only the run that passed is released; how many runs there were stays secret.

    Args:
        event: One run, its score included.
        stop: Probability to give up after a run that did not pass, in (0, 1].

    References:
        Liu and Talwar, arXiv:1811.07971, Algorithm 1, without a limit on the number of runs.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> ThresholdSelection(Gaussian(8.0), stop=0.05).to_dict()["stop"]  # 20 runs at most, on average
        0.05
    """

    type: ClassVar[str] = "threshold_selection"
    event: Event
    stop: float

    def __post_init__(self) -> None:
        check_event("event", self.event)
        set_field(self, "stop", check_number("stop", self.stop, at_least=1e-6, at_most=1.0))


@dataclass(frozen=True)
class SubsampledTuning(Event):
    """Tuning on a Poisson subset of the data, then one final training.

    Args:
        variant: 1: the final training sees the rest of the data; 2: it sees all of it.
        rate: Probability that a record is in the subset, in (0, 1).
        tuning: What happens to the subset.
        training: The final training.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PoissonSampled, Repeated
        >>> run = Repeated(100, PoissonSampled(0.1, Gaussian(2.0)))
        >>> tuning = PrivateSelection(run, Geometric(mean=10))
        >>> SubsampledTuning(variant=2, rate=0.1, tuning=tuning, training=run).rate
        0.1
    """

    type: ClassVar[str] = "subsampled_tuning"
    variant: int
    rate: float
    tuning: Event
    training: Event

    def __post_init__(self) -> None:
        set_field(self, "variant", check_integer("variant", self.variant, at_least=1, at_most=2))
        set_field(self, "rate", check_number("rate", self.rate, above=0.0, below=1.0))
        check_event("tuning", self.tuning)
        check_event("training", self.training)
