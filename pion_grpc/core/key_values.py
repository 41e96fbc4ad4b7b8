"""What goes into keys and comes out of them, and what can be wrong with asking.

Knows neither tables nor commands. The one decision: the rules for scores are values with their own
arithmetic, so that a sorted set asks them and knows none of them.
"""

import math
from typing import NamedTuple, TypeAlias

from pion_grpc.core.blobs import WrittenBlob


class KeyspaceError(Exception):
    """What was asked cannot be done with what is there; nothing has changed."""


class WrongKind(KeyspaceError):
    """The key holds another kind of value."""


class NoSuchKey(KeyspaceError):
    """There is no such key."""


class NotANumber(KeyspaceError):
    """A value is not a number, or would no longer fit into one."""


class TooLong(KeyspaceError):
    """A string would exceed what a string may have."""


class LargeValue(NamedTuple):
    """A string that is in a blob; open it with `Keyspace.open`."""

    blob: int
    size: int


Value: TypeAlias = bytes | LargeValue
NewValue: TypeAlias = bytes | WrittenBlob


class ScoreRules(NamedTuple):
    """Which scores of a sorted set may be set."""

    only_new: bool = False
    only_known: bool = False
    only_greater: bool = False
    only_less: bool = False
    add: bool = False
    """Whether the score is added to the old one."""

    def outcome(self, known: float | None, wanted: float) -> float | None:
        """Returns the score that a member gets; None if it stays as it is.

        Raises:
            NotANumber: the sum is not a number.
        """
        if known is None:
            return None if self.only_known else wanted
        if self.only_new:
            return None
        score = known + wanted if self.add else wanted
        if math.isnan(score):
            raise NotANumber("resulting score is not a number (NaN)")
        if (self.only_greater and score <= known) or (self.only_less and score >= known):
            return None
        return score


class ScoresAdded(NamedTuple):
    """What setting scores has changed."""

    added: int
    changed: int
    last: float | None
    """The score of the last member; None if the rules left it alone."""


class ScoreSpan(NamedTuple):
    """Scores from `low` to `high`, each end in or out."""

    low: float
    high: float
    without_low: bool = False
    without_high: bool = False

    def closed(self) -> tuple[float, float]:
        """Returns the least and the greatest score that are in."""
        low = math.nextafter(self.low, math.inf) if self.without_low else self.low
        high = math.nextafter(self.high, -math.inf) if self.without_high else self.high
        return low, high
