import numpy as np
import pytest

from rlpost.errors import TrainerError
from rlpost.trainers.megatron.packing import dummy, pack, unpack


def row(tokens, mask, **columns):
    return {"token_ids": np.array(tokens), "loss_mask": np.array(mask), **columns}


TWO = [row([5, 6, 7, 8], [0, 0, 1, 1]), row([5, 9], [0, 1])]


def test_the_first_response_token_is_predicted_by_the_last_prompt_token():
    batch = pack(("a", "b"), TWO, columns=(), multiple=1)
    assert batch.hidden_rows_M.tolist() == [1, 2, 4]
    assert batch.targets_M.tolist() == [7, 8, 9]


def test_no_loss_token_is_predicted_by_another_sequence():
    batch = pack(("a", "b"), TWO, columns=(), multiple=1)
    sequence_T = np.repeat(np.arange(2), batch.lengths)
    assert sequence_T[batch.hidden_rows_M].tolist() == batch.sequence_M.tolist()


def test_packing_adds_no_tokens():
    batch = pack(("a", "b"), TWO, columns=(), multiple=1)
    assert batch.token_ids_T.tolist() == [5, 6, 7, 8, 5, 9]
    assert batch.lengths == (4, 2)
    assert batch.lengths_S.tolist() == [2, 1]


def test_columns_are_taken_at_the_loss_tokens():
    old = np.array([np.nan, np.nan, -1.0, -2.0])
    batch = pack(("a",), [row([5, 6, 7, 8], [0, 0, 1, 1], old=old)], columns=("old",), multiple=1)
    assert batch.columns["old"].tolist() == [-1.0, -2.0]


def test_environment_tokens_inside_a_response_carry_no_loss():
    batch = pack(("a",), [row([1, 2, 3, 4, 5], [0, 1, 0, 0, 1])], columns=(), multiple=1)
    assert batch.hidden_rows_M.tolist() == [0, 3]
    assert batch.targets_M.tolist() == [2, 5]


def test_filling_up_for_sequence_parallelism_adds_a_sequence_without_loss():
    batch = pack(("a", "b"), TWO, columns=(), multiple=4)
    assert len(batch.token_ids_T) == 8
    assert batch.lengths == (4, 2, 2)
    assert batch.targets_M.tolist() == [7, 8, 9]
    assert len(unpack(batch, np.zeros(3))[0]) == 6


def test_unpacked_values_lie_at_their_own_token_and_are_nan_elsewhere():
    batch = pack(("a", "b"), TWO, columns=(), multiple=1)
    column, lengths = unpack(batch, np.array([-1.0, -2.0, -3.0]))
    assert np.isnan(column[[0, 1, 4]]).all()
    assert column[[2, 3, 5]].tolist() == [-1.0, -2.0, -3.0]
    assert lengths.tolist() == [4, 2]


def test_a_loss_on_the_first_token_is_refused():
    with pytest.raises(TrainerError, match="'a' is 1 at token 0"):
        pack(("a",), [row([5, 6], [1, 1])], columns=(), multiple=1)


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(TrainerError, match="'a' has no tokens"):
        pack(("a",), [row([], [])], columns=(), multiple=1)


def test_a_dummy_micro_batch_has_tokens_but_no_loss():
    batch = dummy(multiple=2)
    assert len(batch.token_ids_T) == 2
    assert batch.num_loss_tokens == 0
