"""The rollout worker: groups and their columns, what can't be trained, the samples file."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_engine import EOS, FakeEngine, FakeTokenizer
from rollout_rig import groups, prompts, rewards

from rlpost.distillation.context import TeacherContext
from rlpost.errors import BudgetError
from rlpost.rollout.requests import sampling_seed
from rlpost.types import SampleBlock, Sampling


async def test_a_group_has_every_column_at_the_right_place(make_worker, objects):
    engine = FakeEngine()
    engine.version = 3
    worker = await make_worker([engine], reward=rewards(main="length"))
    (group,) = await groups(worker, prompts(1))
    await worker.close()
    block = objects.fetch(group.block)
    rows = dict(block.rows())
    assert group.sample_ids == ("p/0@0#0", "p/0@0#1") == tuple(rows)
    row = rows["p/0@0#1"]
    assert row["token_ids"].tolist() == [*map(ord, "1+1=1"), EOS]
    assert row["loss_mask"].tolist() == [False] * 4 + [True] * 2
    assert np.isnan(row["rollout_logprobs"][:4]).all()
    assert row["rollout_logprobs"][4:].tolist() == [-0.5, -0.5]
    assert row["policy_versions"].tolist() == [-1] * 4 + [3] * 2
    assert (row["prompt"], row["response"], row["answer"]) == ("1+1=", "1", "2")
    assert (row["reward"], row["reward/main"], row["verdict/main"]) == (1.0, 1.0, "ok")
    assert (group.lengths, group.loss_tokens, group.oldest_version) == ((6, 6), (2, 2), 3)
    assert (group.rewards, group.accuracies, group.failure) == ((1.0, 1.0), (1.0, 1.0), "")
    assert group.part_rewards == {"main": (1.0, 1.0)}
    assert group.verdict_counts == {"ok": 2}


async def test_a_group_is_as_old_as_the_oldest_of_its_tokens(make_worker, objects):
    class UpdatedInFlight(FakeEngine):
        def generate(self, request):
            answer = super().generate(request)
            versions = np.arange(4, 4 + len(answer.token_ids), dtype=np.int32)
            return dataclasses.replace(answer, policy_versions=versions)

    worker = await make_worker([UpdatedInFlight()])
    (group,) = await groups(worker, prompts(1))
    assert objects.fetch(group.block).tokens["policy_versions"].tolist() == [*[-1] * 4, 4, 5] * 2
    assert group.oldest_version == 4


def test_seeds_are_a_function_of_identity_alone():
    prompt = prompts(1)[0]
    moved = dataclasses.replace(prompt, index=99)
    assert sampling_seed(7, prompt, 0, turn=0) == sampling_seed(7, moved, 0, turn=0)
    others = {
        sampling_seed(8, prompt, 0, turn=0),
        sampling_seed(7, prompt, 1, turn=0),
        sampling_seed(7, prompt, 0, turn=1),
        sampling_seed(7, dataclasses.replace(prompt, epoch=1), 0, turn=0),
        sampling_seed(7, dataclasses.replace(prompt, prompt_id="q"), 0, turn=0),
    }
    assert len(others | {sampling_seed(7, prompt, 0, turn=0)}) == 6


async def test_a_prompt_that_is_too_long_fails_under_its_name(make_worker, objects):
    engine = FakeEngine()
    worker = await make_worker([engine])
    long, short = await groups(worker, [*prompts(1, text="123456789"), *prompts(2)[1:]])
    assert (long.failure, long.sample_ids, short.failure) == ("prompt_too_long", (), "")
    assert objects.fetch(long.block).scalars["prompt"].tolist() == ["123456789"]
    assert len(engine.submissions[0]) == 2


async def test_an_aborted_answer_is_not_trained_as_complete(make_worker, objects):
    reasons = iter(["stop", "abort"])
    engine = FakeEngine(lambda request: ([ord("1"), EOS], next(reasons)))
    worker = await make_worker([engine])
    (group,) = await groups(worker, prompts(1))
    assert (group.failure, group.rewards) == ("aborted", ())
    assert objects.fetch(group.block).scalars["finish_reason"].tolist() == ["stop", "abort"]


async def test_a_length_stop_is_marked_truncated(make_worker, objects):
    worker = await make_worker([FakeEngine(lambda request: ([ord("1")] * 3, "length"))])
    (group,) = await groups(worker, prompts(1))
    assert group.finish_reasons == ("length", "length")
    assert objects.fetch(group.block).scalars["truncated"].tolist() == [True, True]


async def test_a_missing_verdict_is_nan_not_zero(make_worker, objects):
    worker = await make_worker([FakeEngine()], reward=rewards(0.3, main="length", slow="hang"))
    (group,) = await groups(worker, prompts(1))
    await worker.close()
    assert np.isnan(group.rewards).all() and group.accuracies == (1.0, 1.0)
    assert group.verdict_counts == {"ok": 2, "timeout": 2}
    assert objects.fetch(group.block).scalars["verdict/slow"].tolist() == ["timeout"] * 2


async def test_generation_that_keeps_failing_stops_the_run(make_worker):
    worker = await make_worker([FakeEngine(lambda request: ([ord("1")], "abort"))])
    first, second = await groups(worker, prompts(2))
    assert first.failure == second.failure == "aborted"
    with pytest.raises(BudgetError, match=r"generation failed 3 times in a row.*aborted"):
        await groups(worker, prompts(1))


async def test_eval_uses_its_own_sampling_and_group_size(make_worker):
    engine = FakeEngine()
    worker = await make_worker([engine])
    greedy = Sampling(temperature=0.0, top_p=1.0, max_tokens=4)
    (group,) = await groups(worker, prompts(1), group_size=1, sampling=greedy, record="eval")
    (request,) = engine.submissions[0]
    assert request.sampling == greedy and len(group.sample_ids) == 1


async def test_a_prompt_can_be_evaluated_while_it_is_trained_on(make_worker):
    """Where the held-out prompts are those of the training data, and groups are in flight."""
    worker = await make_worker([FakeEngine()])
    (training,) = await worker.begin(prompts(1))
    greedy = Sampling(temperature=0.0, top_p=1.0, max_tokens=4)
    (asked,) = await groups(worker, prompts(1), group_size=1, sampling=greedy, record="eval")
    trained = await worker.finish(training)
    assert (len(asked.sample_ids), len(trained.sample_ids)) == (1, 2)


async def test_a_prompt_can_t_be_begun_or_finished_twice(make_worker):
    worker = await make_worker([FakeEngine()])
    (key,) = await worker.begin(prompts(1))
    with pytest.raises(ValueError, match="p/0@0"):
        await worker.begin(prompts(1))
    await worker.finish(key)
    with pytest.raises(ValueError, match="finished already"):
        await worker.finish(key)


async def test_samples_hold_every_sample_trained_or_dropped(make_worker, objects, tmp_path):
    worker = await make_worker([FakeEngine()], reward=rewards(main="length", slow="raise"))
    trained, dropped = await groups(worker, prompts(2))
    (long,) = await groups(worker, prompts(3, text="123456789")[2:])
    await worker.close()
    names = trained.sample_ids
    extra = SampleBlock(
        names,
        lengths=np.array([6, 6]),
        tokens={"old_logprobs": np.full(12, -0.25, np.float32)},
        scalars={"advantage": np.array([0.5, -0.5])},
    )
    entries = [(trained, "trained"), (dropped, "constant_reward"), (long, long.failure)]
    path = await worker.write_samples(12, entries, (trained.block, objects.put(extra)))
    assert path == tmp_path / "samples" / "step_000012.parquet"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    rows = pq.read_table(path).to_pylist()
    assert [row["reason"] for row in rows] == (
        ["trained"] * 2 + ["constant_reward"] * 2 + ["prompt_too_long"]
    )
    first, last = rows[0], rows[-1]
    assert (first["sample_id"], first["step"], first["advantage"]) == (names[0], 12, 0.5)
    assert first["token_ids"] == [*map(ord, "1+1=1"), EOS]
    assert first["old_logprobs"] == [-0.25] * 6 and rows[2]["old_logprobs"] is None
    assert first["loss_mask"] == [False] * 4 + [True] * 2
    assert (first["reward/main"], first["verdict/slow"]) == (1.0, "error")
    assert (last["prompt"], last["response"], last["reward/main"]) == ("123456789", "", None)


HINTED = TeacherContext(
    hint_template="{answer}{prompt}", route_by=None, teachers=("one",), max_length=24
)


async def test_the_teachers_prompt_is_tokenised_once_and_travels_with_the_group(
    make_worker, objects
):
    worker = await make_worker([FakeEngine()], teacher=HINTED)
    (group,) = await groups(worker, prompts(1))
    block = objects.fetch(group.block)
    assert group.teacher == "one"
    expected = FakeTokenizer().encode("21+1=")
    assert block.scalars["teacher_prompt_ids"].tolist() == [expected, expected]
    assert block.scalars["prompt_length"].tolist() == [4, 4]


async def test_a_hint_too_long_for_the_teacher_fails_its_group_by_that_name(make_worker):
    worker = await make_worker([FakeEngine()], teacher=dataclasses.replace(HINTED, max_length=20))
    (group,) = await groups(worker, prompts(1))
    assert group.failure == "hint_too_long"
