"""Drawing prompts from the ledger and booking what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.data.ledger import Ledger, State
from rlpost.errors import BudgetError, DataError
from rlpost.loops.batches import Batch
from rlpost.types import GroupHandle, Prompt


class DrawBudgetError(BudgetError):
    """Far too few prompts of a batch can be trained. `batch` holds what was dropped."""

    def __init__(self, message: str, batch: Batch) -> None:
        super().__init__(message)
        self.batch = batch


def draw_prompts(ledger: Ledger, count: int) -> list[Prompt]:
    """Draws and leases `count` prompts. Raises DataError when the data has ended."""
    prompts = []
    for _ in range(count):
        prompt = ledger.draw()
        if prompt is None:
            raise DataError(f"the data ended after {ledger.num_drawn} prompts; raise num_epochs")
        ledger.move(prompt.key, "leased")
        prompts.append(prompt)
    return prompts


def check_draw_budget(
    step: int,
    wanted: int,
    kept: int,
    dropped: Sequence[tuple[GroupHandle, str]],
    max_draw_factor: float,
) -> None:
    """Raises DrawBudgetError when far too many prompts were drawn for a batch that is not full."""
    drawn = kept + len(dropped)
    if kept < wanted and drawn > wanted * max_draw_factor:
        reasons = sorted({reason for _, reason in dropped})
        raise DrawBudgetError(
            f"step {step + 1}: {len(dropped)} of {drawn} prompts were dropped "
            f"({', '.join(reasons)}) and the batch still lacks {wanted - kept} of {wanted}; "
            f"look at samples/ and the reward, or raise loop.max_draw_factor",
            Batch.of(step, [], dropped, generate_s=0.0, reward_s=0.0),
        )


def book(ledger: Ledger, group: GroupHandle, reason: str) -> None:
    """Moves a finished group on: admitted, filtered (scored but unusable) or failed."""
    if group.failure:
        ledger.move(group.prompt_key, "failed")
        return
    steps: tuple[State, ...] = ("generated", "scored", "filtered" if reason else "admitted")
    for state in steps:
        ledger.move(group.prompt_key, state)
