"""Every trap of the zoo: refused, harmless and shown to be, or on the page Pitfalls."""

from __future__ import annotations

from pathlib import Path

import pytest

from privtune.errors import PrivTuneError
from tests.zoo.trap import BOUND, Trap, run, scored_share, share
from tests.zoo.traps_build import BUILDS
from tests.zoo.traps_data import DATA
from tests.zoo.traps_loss import LOSSES, SCORES

TRAPS = (*BUILDS, *LOSSES, *SCORES, *DATA)
