import pytest
import torch
from trainer_ranks import trainer_config

from rlpost.cluster.rendezvous import Rendezvous
from rlpost.errors import TrainerError
from rlpost.trainers.base import RankSpec
from rlpost.trainers.megatron.offload import Offloader
from rlpost.trainers.megatron.options import LrScheduleConfig, learning_rate
from rlpost.trainers.megatron.rank import MegatronRank


def rates(schedule, steps):
    return [learning_rate(schedule, 1.0, step) for step in steps]


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    schedule = LrScheduleConfig("constant", warmup_steps=4, decay_steps=0, min_lr=0.0)
    assert rates(schedule, range(6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decay_reaches_min_lr_at_decay_steps_and_stays(kind, middle):
    schedule = LrScheduleConfig(kind, warmup_steps=2, decay_steps=10, min_lr=0.1)
    assert rates(schedule, [1, 2, 6, 10, 99]) == pytest.approx([1.0, 1.0, middle, 0.1, 0.1])


def test_cosine_decays_slowly_at_first():
    shapes = [LrScheduleConfig(kind, 0, 10, 0.0) for kind in ("linear", "cosine")]
    assert rates(shapes[1], [2])[0] > rates(shapes[0], [2])[0]


def test_options_without_effect_and_empty_decays_are_refused():
    with pytest.raises(ValueError, match="no effect with kind constant"):
        LrScheduleConfig("constant", 0, 10, 0.0)
    with pytest.raises(ValueError, match=r"decay_steps \(5\) must be greater than warmup_steps"):
        LrScheduleConfig("cosine", 5, 5, 0.0)


def test_offloading_keeps_views_connected():
    buffer, gradient = torch.arange(8.0), torch.ones(8)
    parameter, shard = buffer[:4].view(2, 2), buffer[2:6]
    offloader = Offloader()
    offloader.offload([parameter, shard], [gradient])
    assert buffer.untyped_storage().nbytes() == gradient.untyped_storage().nbytes() == 0
    offloader.offload([parameter, shard], [gradient])  # a second call keeps what the first saved
    offloader.onload()
    assert buffer.tolist() == list(range(8))
    assert gradient.tolist() == [0.0] * 8
    shard.add_(10)
    assert parameter.tolist() == [[0.0, 1.0], [12.0, 13.0]]


def test_a_rank_has_at_most_one_gpu():
    with pytest.raises(ValueError, match=r"num_gpus_per_rank \(2\): one rank computes on one GPU"):
        trainer_config(num_gpus_per_rank=2.0)


def test_a_rank_that_was_promised_a_gpu_does_not_go_on_without():
    rank = MegatronRank(
        trainer_config(num_gpus_per_rank=0.5), spec=RankSpec("actor", 0, 1, Rendezvous("", 0, 0)),
        model_path="",
        dtype="float32", algorithm=None, temperature=1.0, seed=0,
    )  # fmt: skip
    with pytest.raises(TrainerError, match=r"actor\[0\] asked for num_gpus_per_rank \(0\.5\)"):
        rank._check_device(has_cuda=False)
