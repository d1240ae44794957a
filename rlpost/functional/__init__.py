"""Pure tensor maths of policy-gradient losses: values in, values out, nothing logged.

Letters: N samples of a batch, S sequences, M loss tokens of S sequences laid end to end.
Only loss tokens stand in [M] arrays, so there are no masks for prompts or environment tokens.
A missing reward is NaN: it enters no statistic and comes out as NaN. A token whose numbers are not
finite is dropped: functions that may meet one return `keep_M` beside their values.
"""

from rlpost.functional.groups import (
    GroupStats,
    Singleton,
    Std,
    group_centered,
    group_normalized,
    group_stats,
    leave_one_out,
)
from rlpost.functional.ratios import (
    SequenceMean,
    cispo,
    correction_log_weights,
    mask_weights,
    outside,
    ppo_clip,
    sequence_ratio,
    token_ratio,
    truncated_weights,
)
from rlpost.functional.terms import Aggregation, KlEstimator, aggregation_weights, kl_estimate
from rlpost.functional.tokens import (
    at_last_token,
    centred,
    gae,
    return_to_go,
    sequence_mean,
    sequence_numbers,
    sequence_sum,
    whiten,
)
from rlpost.functional.values import clipped_value_loss, explained_variance

__all__ = [
    "Aggregation",
    "GroupStats",
    "KlEstimator",
    "SequenceMean",
    "Singleton",
    "Std",
    "aggregation_weights",
    "at_last_token",
    "centred",
    "cispo",
    "clipped_value_loss",
    "correction_log_weights",
    "explained_variance",
    "gae",
    "group_centered",
    "group_normalized",
    "group_stats",
    "kl_estimate",
    "leave_one_out",
    "mask_weights",
    "outside",
    "ppo_clip",
    "return_to_go",
    "sequence_mean",
    "sequence_numbers",
    "sequence_ratio",
    "sequence_sum",
    "token_ratio",
    "truncated_weights",
    "whiten",
]
