"""Initial weights from a trial's own stream, also where trials share a process."""

from __future__ import annotations

from types import TracebackType

import torch

from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams


class Initialisation:
    """Seeds torch's global generator for one trial until its model is made.

    Args:
        streams: The trial's.

    **Guarantee**: what is drawn before :meth:`done` depends on the trial's secret alone, however
    many threads run trials; the generator is then put back as it was.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._state: torch.Tensor | None = None

    def __enter__(self) -> Initialisation:
        # Layers draw their first weights from it: trials take turns until their model is made.
        GLOBAL_GENERATOR.acquire()
        self._state = torch.get_rng_state()
        torch.default_generator.manual_seed(self._streams.seed("initialisation"))
        return self

    def done(self) -> None:
        """Hand the generator back; once is enough."""
        if self._state is not None:
            torch.set_rng_state(self._state)
            self._state = None
            GLOBAL_GENERATOR.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done()
