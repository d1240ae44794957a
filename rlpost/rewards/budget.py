"""How many failures a run bears before it stops with a reason."""

from __future__ import annotations

from collections import deque

from rlpost.errors import BudgetError


class FailureBudget:
    """Raises BudgetError when too many of the last calls failed, or too many in a row."""

    def __init__(
        self, what: str, *, window: int, max_fraction: float, max_consecutive: int
    ) -> None:
        """`window` calls are looked back on; the fraction counts once that many were made."""
        self._what = what
        self._recent: deque[bool] = deque(maxlen=window)
        self._max_fraction = max_fraction
        self._max_consecutive = max_consecutive
        self._consecutive = 0

    def succeeded(self) -> None:
        self._consecutive = 0
        self._recent.append(False)

    def failed(self, detail: str) -> None:
        """Raises BudgetError with `detail`, the reason of this last failure."""
        self._consecutive += 1
        self._recent.append(True)
        if self._consecutive > self._max_consecutive:
            raise BudgetError(
                f"{self._what} failed {self._consecutive} times in a row "
                f"(allowed: {self._max_consecutive}); the last time: {detail}"
            )
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) == self._recent.maxlen and share > self._max_fraction:
            raise BudgetError(
                f"{self._what} failed in {share:.0%} of the last {len(self._recent)} calls "
                f"(allowed: {self._max_fraction:.0%}); the last time: {detail}"
            )
