"""What is measured of a policy-gradient loss: ratios, clips, KL, what was dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.lazy import LazyModule
from rlpost.metrics import Metric, mean

if TYPE_CHECKING:
    import torch

    from rlpost.algorithms.base import LossInputs
    from rlpost.algorithms.policy_gradient import PolicyGradientConfig
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Terms:
    """Per-token terms of one micro-batch [M]; tokens outside `keep_M` enter nothing.

    `ratio_M` is the one in the surrogate: rho itself, or the sequence ratio for gspo.
    `outside_M`: where the correction truncates or masks; None without a correction.
    """

    policy_M: torch.Tensor
    kl_M: torch.Tensor | None
    rho_M: torch.Tensor
    ratio_M: torch.Tensor
    keep_M: torch.Tensor
    outside_M: torch.Tensor | None


def loss_metrics(
    config: PolicyGradientConfig, inputs: LossInputs, terms: Terms, loss: torch.Tensor
) -> dict[str, Metric]:
    """Of one micro-batch, summed up over the optimizer step by their kinds."""
    keep_M, rho_M, ratio_M = terms.keep_M, terms.rho_M.detach(), terms.ratio_M.detach()
    sums = {
        "train/loss": loss.detach(),
        "train/policy_loss": weighted(terms.policy_M, keep_M, inputs.weights_M).detach(),
        "train/dropped_tokens": (~keep_M).sum(),
    }
    # A ratio may underflow to 0.
    log_rho_M = rho_M.clamp(min=torch.finfo(rho_M.dtype).tiny).log()
    means = {"train/approx_kl": rho_M - 1 - log_rho_M}
    if terms.kl_M is not None:
        means["train/kl"] = terms.kl_M.detach()
    if terms.outside_M is not None:
        means["train/correction/outside"] = terms.outside_M
    means |= clipped(config, ratio_M, inputs.advantages_M)
    totals = {name: torch.where(keep_M, value, 0).sum() for name, value in means.items()}
    highest = torch.where(keep_M, ratio_M, 0.0).max() if len(ratio_M) else loss.detach() * 0
    # One transfer from the device for all numbers.
    values = [*sums.values(), *totals.values(), highest, keep_M.sum()]
    numbers = torch.stack([value.double() for value in values]).tolist()
    count = numbers[-1]
    metrics = {
        name: Metric("step_mean" if name.endswith("loss") else "sum", numbers[i])
        for i, name in enumerate(sums)
    }
    metrics |= {name: mean(numbers[len(sums) + i], count) for i, name in enumerate(totals)}
    return metrics | {"train/ratio/max": Metric("max", numbers[-2])}


def clipped(
    config: PolicyGradientConfig, ratio_M: torch.Tensor, advantages_M: torch.Tensor
) -> dict[str, torch.Tensor]:
    """1 where a bound changes the loss (for cispo: the weight), by bound."""
    if config.clip_low is None or config.clip_high is None:
        return {}
    high_M, low_M = ratio_M > 1 + config.clip_high, ratio_M < 1 - config.clip_low
    if config.policy_loss != "cispo":
        high_M, low_M = high_M & (advantages_M > 0), low_M & (advantages_M < 0)
    clipped = {"train/clip_fraction/high": high_M, "train/clip_fraction/low": low_M}
    if config.dual_clip is not None:
        dual_M = (advantages_M < 0) & (ratio_M > config.dual_clip)
        clipped["train/clip_fraction/dual"] = dual_M
    return clipped


def weighted(values_M: torch.Tensor, keep_M: torch.Tensor, weights_M: torch.Tensor) -> torch.Tensor:
    return (torch.where(keep_M, values_M, 0.0) * weights_M).sum()
