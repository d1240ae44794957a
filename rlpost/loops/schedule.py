"""When a run's steps train the actor, end an epoch, or end the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Counts of the run, fixed before it starts.

    A step is one batch: `num_ppo_epochs` visits of `num_minibatches` optimizer steps each.
    Where `trains_policy` is false, the trained model is another than the one that answers.
    `step_deadline_s` bounds each call of the trainers.
    """

    num_steps: int
    steps_per_epoch: int
    prompts_per_step: int
    num_minibatches: int
    num_ppo_epochs: int
    num_critic_only_steps: int
    trains_policy: bool
    step_deadline_s: float

    def is_last(self, step: int) -> bool:
        return step == self.num_steps

    def trains_actor(self, step: int) -> bool:
        """Whether batch number `step` (from 0) trains the actor, or the critic only."""
        return step >= self.num_critic_only_steps

    def makes_version(self, step: int) -> bool:
        """Whether batch number `step` (from 0) leads to a new policy."""
        return self.trains_policy and self.trains_actor(step)

    def is_epoch_end(self, step: int) -> bool:
        return step > 0 and step % self.steps_per_epoch == 0
