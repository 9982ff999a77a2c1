"""The chart of a schedule's choice: shortfall against batch, at several amounts of work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.plots.style import COLOURS, new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from privtune.strategies.schedule_rule import ScheduleCurve, SchedulePoint


def plot_schedule(curve: ScheduleCurve) -> go.Figure:
    """Plot what every batch would have of noise and missing steps, a line for each amount of work.

    Args:
        curve: From :func:`privtune.strategies.schedule_rule.schedule_curve`.

    Returns:
        A figure with logarithmic axes; the lower, the better. A star marks the schedule of the plan.

    Example:
        >>> from privtune.strategies.schedule_rule import TrainingFacts, choose_schedule, schedule_curve
        >>> facts = TrainingFacts(records=1_000, weights=100, epsilon=1.0, delta=1e-5)
        >>> curve = schedule_curve(facts, choose_schedule(facts, 20_000).point)
        >>> [trace.name for trace in plot_schedule(curve).data][-1]
        'the plan'
    """
    import plotly.graph_objects as go

    figure = new_figure(
        x="expected batch size", y="noise and missing steps (shortfall)", height=440
    )
    for (factor, points), colour in zip(curve.lines.items(), COLOURS, strict=False):
        figure.add_trace(
            go.Scatter(
                x=[point.batch for point in points],
                y=[point.shortfall for point in points],
                mode="lines+markers",
                name=f"{factor:g} x work",
                line={"color": colour},
                text=_hover_texts(points),
                hovertemplate="%{text}<extra></extra>",
            )
        )
    chosen = curve.chosen
    figure.add_trace(
        go.Scatter(
            x=[chosen.batch],
            y=[chosen.shortfall],
            mode="markers",
            name="the plan",
            marker={"symbol": "star", "size": 16, "color": "#d55e00"},
            text=_hover_texts([chosen]),
            hovertemplate="%{text}<extra></extra>",
        )
    )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    figure.update_layout(showlegend=True)
    return figure


def _hover_texts(points: Sequence[SchedulePoint]) -> list[str]:
    """Return the text that is shown beside each point under the pointer."""
    texts = []
    for point in points:
        texts.append(
            f"{point.epochs:.4g} epochs of {point.batch:,}: {point.steps:,} steps, σ = "
            f"{point.noise_multiplier:.3g}, noise-to-signal {point.noise_to_signal:.3g}"
        )
    return texts
