"""Account for differential privacy: events, laws of the number of runs, guarantees, and calibration.

No I/O, no torch, no clock. Every epsilon is an upper bound, rounded pessimistically; where several
bounds apply the smallest is reported and named.
"""

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.accounting.accountant import Guarantee, delta, epsilon, group_privacy, lower_bound
    from privtune.accounting.calibration import (
        Calibration,
        CalibrationError,
        SharedBudget,
        calibrate,
        scale_noise,
        share_budget,
    )
    from privtune.accounting.costs import Explanation, explain
    from privtune.accounting.dpsgd_event import dpsgd_event
    from privtune.accounting.events import (
        ZCDP,
        Adjacency,
        ApproximateDP,
        Composed,
        Event,
        Gaussian,
        Joint,
        Laplace,
        NonPrivate,
        Parallel,
        PoissonSampled,
        PrivateSelection,
        Repeated,
        SubsampledTuning,
        ThresholdSelection,
        WorstOf,
        event_from_dict,
        event_from_json,
    )
    from privtune.accounting.runs import (
        Binomial,
        Geometric,
        Logarithmic,
        Poisson,
        RunLaw,
        TruncatedNegativeBinomial,
        run_law_from_dict,
    )

__all__ = [
    "ZCDP",
    "Adjacency",
    "ApproximateDP",
    "Binomial",
    "Calibration",
    "CalibrationError",
    "Composed",
    "Event",
    "Explanation",
    "Gaussian",
    "Geometric",
    "Guarantee",
    "Joint",
    "Laplace",
    "Logarithmic",
    "NonPrivate",
    "Parallel",
    "Poisson",
    "PoissonSampled",
    "PrivateSelection",
    "Repeated",
    "RunLaw",
    "SharedBudget",
    "SubsampledTuning",
    "ThresholdSelection",
    "TruncatedNegativeBinomial",
    "WorstOf",
    "calibrate",
    "delta",
    "dpsgd_event",
    "epsilon",
    "event_from_dict",
    "event_from_json",
    "explain",
    "group_privacy",
    "lower_bound",
    "run_law_from_dict",
    "scale_noise",
    "share_budget",
]

__getattr__ = lazily(__name__, __file__)
