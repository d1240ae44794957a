"""A batch is drawn until it is full: what is dropped is replaced, and booked under its reason."""

import pytest

from rlpost.data.ledger import Ledger
from rlpost.errors import BudgetError, DataError
from rlpost.loops.intake import Intake
from rlpost.types import GroupHandle, Prompt


class Prompts:
    name = "fake"

    def __len__(self):
        return 10

    def get(self, epoch, index):
        return Prompt(f"p{index}", epoch, index, text="x")


class Rollouts:
    """`bad`: prompt -> its rewards, or why it failed; the others are good."""

    def __init__(self, bad):
        self.bad, self.asked = bad, []

    async def generate(self, prompts, *, policy_version):
        self.asked.append(([prompt.prompt_id for prompt in prompts], policy_version))
        return [self.group(prompt) for prompt in prompts]

    def group(self, prompt):
        found = self.bad.get(prompt.prompt_id, (1.0, 0.0))
        failure = found if isinstance(found, str) else ""
        return GroupHandle(
            prompt_key=prompt.key, sample_ids=(), block=None, rewards=() if failure else found,
            accuracies=(), lengths=(), loss_tokens=(), finish_reasons=(), oldest_version=0,
            verdict_counts={}, generate_s=2.0, reward_s=0.0, failure=failure,
        )  # fmt: skip


def intake_of(bad, *, num_prompts=None, drop_constant=True):
    rollouts = Rollouts(bad)
    ledger = Ledger(Prompts(), num_epochs=None, num_prompts=num_prompts)
    return Intake(ledger, rollouts, 3, scored=True, drop_constant=drop_constant), rollouts, ledger


async def test_dropped_groups_are_replaced_by_as_many_and_none_is_lost():
    bad = {"p0": "aborted", "p2": (1.0, 1.0), "p4": (float("nan"),) * 2}
    intake, rollouts, ledger = intake_of(bad)
    batch = await intake.batch(0, policy_version=7, max_draw_factor=9.0)
    assert [group.prompt_key for group in batch.groups] == ["p1@0", "p3@0", "p5@0"]
    assert rollouts.asked == [(["p0", "p1", "p2"], 7), (["p3", "p4"], 7), (["p5"], 7)]
    reasons = {group.prompt_key: reason for group, reason in batch.dropped}
    assert reasons == {"p0@0": "aborted", "p2@0": "constant_reward", "p4@0": "no_reward"}
    assert batch.generate_s == 6.0, "seconds of three rounds, each as long as its slowest group"
    assert (ledger.counts["filtered"], ledger.counts["failed"]) == (2, 1)
    ledger.check()


async def test_equal_rewards_are_dropped_only_where_the_algorithm_samples_dynamically():
    intake, _, _ = intake_of({"p0": (1.0, 1.0)}, drop_constant=False)
    batch = await intake.batch(0, policy_version=0, max_draw_factor=9.0)
    assert batch.dropped == () and len(batch.groups) == 3


async def test_a_reward_that_never_answers_stops_the_run_instead_of_eating_the_data():
    intake, _, ledger = intake_of({f"p{n}": (float("nan"),) for n in range(10)})
    with pytest.raises(BudgetError, match=r"6 of 6 prompts were dropped \(no_reward\)"):
        await intake.batch(0, policy_version=0, max_draw_factor=1.5)
    assert ledger.num_drawn == 6


async def test_data_that_end_within_a_batch_are_an_error():
    intake, _, _ = intake_of({}, num_prompts=2)
    with pytest.raises(DataError, match="the data ended after 2 prompts"):
        await intake.batch(0, policy_version=0, max_draw_factor=9.0)
