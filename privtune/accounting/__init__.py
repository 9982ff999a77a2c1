"""Numbers in, numbers out: events, laws of the number of runs, guarantees, calibration.

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
    from privtune.accounting.hyfreedp import (
        HyFreeNoise,
        hyfreedp_event,
        hyfreedp_loss_steps,
        hyfreedp_noise,
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
    "HyFreeNoise",
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
    "epsilon",
    "event_from_dict",
    "event_from_json",
    "explain",
    "group_privacy",
    "hyfreedp_event",
    "hyfreedp_loss_steps",
    "hyfreedp_noise",
    "lower_bound",
    "run_law_from_dict",
    "scale_noise",
    "share_budget",
]

__getattr__ = lazily(__name__, __file__)
