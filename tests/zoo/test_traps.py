"""Every trap of the zoo: refused, harmless and shown to be, or on the page Pitfalls."""

from __future__ import annotations

from tests.zoo.traps_build import BUILDS
from tests.zoo.traps_data import DATA
from tests.zoo.traps_loss import LOSSES, SCORES

TRAPS = (*BUILDS, *LOSSES, *SCORES, *DATA)
