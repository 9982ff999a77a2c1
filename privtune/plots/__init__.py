"""Figures of a study, as Plotly figures, in the manner of ``optuna.visualization``.

Every function takes a study and shows releases, plans and charges; none can show a sealed trial.
``plot_results`` and ``plot_lines`` take the rows of a results file: releases of many studies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.plots._results import plot_lines, plot_results
    from privtune.plots.schedule_chart import plot_schedule
    from privtune.plots.study_charts import (
        plot_audit,
        plot_audits,
        plot_budget,
        plot_comparison,
        plot_epsilon_spent,
        plot_runs,
        plot_trajectories,
    )

__all__ = [
    "plot_audit",
    "plot_audits",
    "plot_budget",
    "plot_comparison",
    "plot_epsilon_spent",
    "plot_lines",
    "plot_results",
    "plot_runs",
    "plot_schedule",
    "plot_trajectories",
]

__getattr__ = lazily(__name__, __file__)
