"""Training a process reward model: which steps of a response are right, from scored steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from rlpost.lazy import LazyModule
from rlpost.metrics import Metric, mean

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class StepClassificationConfig:
    num_minibatches: PositiveInt
    num_ppo_epochs: PositiveInt

    def conflicts(self, run: Any) -> Iterator[str]:
        """`run` is the whole RunConfig."""
        if run.prm is None:
            yield "prm: null, but the scores of steps are what is learned; choose prm=verifier"
        elif run.prm.config.credit is not None:
            yield "prm.credit: has no effect, as no policy is trained; set prm.credit=null"
        if not getattr(run.trainer.target, "classifies", False):
            yield (
                f"trainer: {run.trainer.target.__name__} trains a policy, but this algorithm "
                "trains a classifier of steps; choose trainer=megatron_classifier"
            )
        if run.weight_sync is not None:
            yield (
                "weight_sync: has no effect, as the policy stays as it is; switch it off "
                "(~weight_sync)"
            )


class StepClassification:
    """Cross-entropy of two labels at the last token of each scored step.

    L = -mean_s (r_s log p_s + (1 - r_s) log(1 - p_s)) over the steps of an optimizer step, on all
    ranks; p_s is the softmax share of label 1, r_s in [0, 1] the step's score. Steps without a
    score are left out. The policy that made the responses is not trained.
    """

    Config = StepClassificationConfig
    passes: tuple[str, ...] = ()
    dynamic_sampling = False
    trains_policy = False

    def __init__(self, config: StepClassificationConfig) -> None:
        self.config = config
        self.num_minibatches = config.num_minibatches
        self.num_ppo_epochs = config.num_ppo_epochs

    def loss(
        self, outputs_M2: torch.Tensor, scores_M: torch.Tensor, weights_M: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """M scored steps of a micro-batch; each weighs one over the steps of the optimizer step."""
        wanted_M2 = torch.stack([1 - scores_M, scores_M], dim=1)
        log_p_M2 = torch.log_softmax(outputs_M2.float(), dim=1)
        loss = -(weights_M * (wanted_M2 * log_p_M2).sum(dim=1)).sum()
        right = ((log_p_M2[:, 1] > log_p_M2[:, 0]) == (scores_M > 0.5)).sum()
        value, hits = torch.stack([loss.detach().double(), right.double()]).tolist()
        return loss, {
            "train/loss": Metric("step_mean", value),
            "train/accuracy": mean(hits, len(scores_M)),
        }
