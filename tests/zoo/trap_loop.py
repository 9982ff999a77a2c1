"""What traps in the loop have in common: what is done with each batch, beside its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from privtune.study.trial import Trial
from tests.zoo.trap import Toy, begin, linear, plain

Enter = Callable[..., Callable[[Any], Any]]


def loop(
    body: Callable[..., object], *, form: str = "losses", model: Callable[[], nn.Module] = linear
) -> Any:
    """Make an objective of what is done with each batch, beside its step."""

    def objective(trial: Trial, data: Toy) -> float:
        made, optimizer, private = begin(trial, data, model())
        for batch in private.batches():
            if form == "by record":
                private.step(batch, plain)
                body(made, optimizer, private, None, None)
                continue
            x, y = batch
            losses = plain(private.model, x, y)
            private.step(losses)
            body(made, optimizer, private, losses, (x, y))
        return trial.score(made, data.validation)

    return objective


def both_forms(enter: Enter) -> Enter:
    """Return what enters what is done after each step, in both forms."""

    def named(verdict: Any, name: str, why: str, **options: Any) -> Callable[[Any], Any]:
        def entered(body: Any) -> Any:
            for form in ("losses", "by record"):
                like = {"like": form if form == "by record" else "by losses"}
                extra = {**options, **(like if verdict == "harmless" else {})}
                enter(verdict, f"{name}: {form}", why, **extra)(loop(body, form=form))
            return body

        return entered

    return named
