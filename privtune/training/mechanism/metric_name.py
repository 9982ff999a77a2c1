"""Names of metrics on a split, such as ``test_accuracy``, and their parts.

Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from privtune.errors import InvalidInputError
from privtune.training.mechanism.metrics import is_share, lower_is_better

SCORED_SPLITS = ("validation", "tuning", "test")
"""What models are scored on; ``tuning`` is a validation score of another model than the released one."""

_SEPARATOR = "_"


@dataclass(frozen=True)
class MetricName:
    """A name of a metric on a split, as in releases, comparisons and figures.

    Args:
        split: One of :data:`SCORED_SPLITS`.
        metric: The metric, as people call it: a function of one's own by its last name.

    Raises:
        InvalidInputError: If no model is scored on the split, or the metric is empty.

    Example:
        >>> name = MetricName("test", "balanced_accuracy")
        >>> str(name), name.words, name.is_share, name.lower_is_better
        ('test_balanced_accuracy', 'test balanced accuracy', True, False)
        >>> MetricName.parse("validation_macro_f1")
        MetricName(split='validation', metric='macro_f1')
    """

    split: str
    metric: str

    def __post_init__(self) -> None:
        if self.split not in SCORED_SPLITS or not self.metric:
            raise _refusal(f"{self.split}{_SEPARATOR}{self.metric}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the name that a text, such as ``test_accuracy``, stands for.

        No split has an underscore in its name, so that a text stands for one name alone.

        Args:
            text: As ``str`` writes it, and as it is stored.

        Raises:
            InvalidInputError: If the text is no name of a metric on a split.

        Example:
            >>> MetricName.parse("accuracy")
            Traceback (most recent call last):
                ...
            privtune.errors.InvalidInputError: metric = 'accuracy': must be a split and a metric, as ...
        """
        split, separator, metric = text.partition(_SEPARATOR)
        if not separator:
            raise _refusal(text)
        return cls(split, metric)

    def __str__(self) -> str:
        return f"{self.split}{_SEPARATOR}{self.metric}"

    @property
    def words(self) -> str:
        """The name in words, for titles."""
        return str(self).replace("_", " ")

    @property
    def lower_is_better(self) -> bool:
        """Whether less of the metric is better."""
        return lower_is_better(self.metric)

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of records, shown in percent."""
        return is_share(self.metric)


def _refusal(text: str) -> InvalidInputError:
    """Return the error for a text that names no metric on a split."""
    splits = ", ".join(SCORED_SPLITS)
    return InvalidInputError(
        "metric",
        text,
        f"must be a split and a metric, as test_accuracy is; splits are {splits}",
    )
