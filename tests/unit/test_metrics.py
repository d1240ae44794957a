import math

import pytest

from rlpost.metrics import Metric, mean, merge, over_steps, results


def test_mean_of_unequal_parts_is_the_mean_of_the_whole():
    parts = [{"a": mean(3.0, 3)}, {"a": mean(9.0, 1)}, {"a": mean(0.0, 0)}]
    assert results(merge(parts)) == {"a": 3.0}


def test_mean_of_nothing_is_nan():
    assert math.isnan(mean(0.0, 0).result())


def test_perplexity_is_the_exponential_of_the_merged_mean():
    parts = [{"p": Metric("exp_mean", 1.0, 3)}, {"p": Metric("exp_mean", 5.0, 1)}]
    assert math.isclose(results(merge(parts))["p"], math.exp(6 / 4))
    assert Metric("exp_mean", 5000.0, 1).result() == math.inf


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 5.0), ("max", 4.0), ("min", 1.0)])
def test_other_reductions(reduce, expected):
    assert Metric(reduce, 1.0).merge(Metric(reduce, 4.0)).result() == expected


def test_names_missing_from_some_parts_are_kept():
    assert results(merge([{"a": mean(1, 1)}, {"b": mean(2, 1)}])) == {"a": 1.0, "b": 2.0}


def test_different_reductions_do_not_merge():
    with pytest.raises(ValueError, match="can't merge a sum with a max"):
        Metric("sum", 1.0).merge(Metric("max", 1.0))


def test_a_loss_is_summed_within_a_step_and_averaged_over_steps():
    rank = over_steps([{"loss": Metric("step_mean", 1.0)}, {"loss": Metric("step_mean", 4.0)}])
    other = over_steps([{"loss": Metric("step_mean", 2.0)}, {"loss": Metric("step_mean", 3.0)}])
    assert results(merge([rank, other]))["loss"] == (3 + 7) / 2
