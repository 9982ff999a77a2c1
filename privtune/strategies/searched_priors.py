"""Public priors of a spec's space: for which method and schedule each is, as the arms say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from privtune.public_priors import fall_of
from privtune.strategies.catalog import STRATEGIES
from privtune.training.methods import METHODS

_DEFAULTS: Mapping[str, object] = {"method": "dpsgd", "schedule": "constant"}
_OF_OTHER_RATES = "noise_floor"


def complete_public_priors(
    space: Mapping[str, object], arms: Sequence[object]
) -> dict[str, object]:
    """Return a spec's space whose public priors say the method and schedule that its arms search with.

    Args:
        space: Laws by hyperparameter, as a spec has them, not checked yet.
        arms: The arms, as a spec has them, not checked yet.

    Returns:
        The space. Where arms differ, a prior gets a list of what they say, which
        ``privtune.public_priors.with_public_priors`` refuses.

    Example:
        >>> arm = {"name": "a", "strategy": "papernot-steinke", "method": "dp-adam"}
        >>> complete_public_priors({"learning_rate": {"prior": "public"}}, [arm])
        {'learning_rate': {'prior': 'public', 'method': 'dp-adam', 'schedule': 'constant'}}
    """
    completed = dict(space)
    for name, fields in space.items():
        if not isinstance(fields, Mapping) or "prior" not in fields:
            continue
        searches = _searches(arms, name)
        settings = dict(fields)
        settings.setdefault("method", _shared(searches, "method"))
        schedule = _shared(searches, "schedule")
        if "schedule" in space:
            # Each candidate draws one: no law was measured for all of them.
            schedule = ["searched"]
        settings.setdefault("schedule", schedule)
        completed[name] = settings
    return completed


def _shared(searches: Sequence[Mapping[str, object]], setting: str) -> object:
    """Return what all searches say of a setting, or a list of what they say where they differ."""
    values: list[object] = []
    kinds: list[object] = []
    for search in searches:
        value = search.get(setting, _DEFAULTS[setting])
        kind = value
        if setting == "schedule":
            # Linear and cosine are one to a prior.
            kind = fall_of(value) or value
        if kind not in kinds:
            kinds.append(kind)
            values.append(value)
    if not values:
        return _DEFAULTS[setting]
    return values[0] if len(values) == 1 else values


def _searches(arms: Sequence[object], name: str) -> list[Mapping[str, object]]:
    """Return the method and schedule of each search that draws a hyperparameter from the space."""
    searches: list[Mapping[str, object]] = []
    for arm in arms:
        if not isinstance(arm, Mapping) or not _draws(arm.get("strategy")):
            continue
        candidates = arm.get("candidates")
        entries = candidates if isinstance(candidates, list | tuple) and candidates else [arm]
        for entry in entries:
            if isinstance(entry, Mapping) and (entry is arm or _lacks(entry, name)):
                searches.append(_search_of(entry))
    return searches


def _draws(strategy: object) -> bool:
    """Return whether the strategy of a name may draw from the space of its study."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        return False
    return bool(STRATEGIES[strategy].needs.draws)


def _lacks(entry: Mapping[str, object], name: str) -> bool:
    """Return whether an entry of a list of methods draws a hyperparameter, which its method takes."""
    parameters = entry.get("parameters")
    method = entry.get("method")
    if isinstance(parameters, Mapping) and name in parameters:
        return False
    return isinstance(method, str) and method in METHODS and name in METHODS[method].parameters


def _search_of(entry: Mapping[str, object]) -> dict[str, object]:
    """Return the method and the schedule of an arm, or of an entry of a list of methods.

    An option by which a method has other rates is named with it: no law was measured for the two.
    """
    search: dict[str, object] = {}
    if "method" in entry:
        search["method"] = entry["method"]
    for holder in ("options", "parameters"):
        # What a candidate is given goes before the option of its method.
        settings = entry.get(holder)
        if not isinstance(settings, Mapping):
            continue
        if "schedule" in settings:
            search["schedule"] = settings["schedule"]
        if settings.get(_OF_OTHER_RATES) is not None:
            search["method"] = f"{entry.get('method')} with {_OF_OTHER_RATES}"
    return search
