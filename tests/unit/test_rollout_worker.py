"""The rollout worker: what engines are asked, what comes back, what can't be trained."""

import asyncio
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_engine import EOS, ChatTokenizer, FakeEngine, FakeStore, FakeTokenizer, FakeWorker
from fake_rewards import pool_config, section

from rlpost.cluster import store
from rlpost.distillation.context import TeacherContext
from rlpost.errors import BudgetError, ConfigError, DataError, RlpostError, WorkerDiedError
from rlpost.rewards.reward_set import PartConfig, RewardSet, RewardSetConfig
from rlpost.rollout import worker as worker_module
from rlpost.rollout.reference import ReferenceRollout, ReferenceRolloutConfig
from rlpost.rollout.requests import sampling_seed
from rlpost.rollout.single_turn import SingleTurn, SingleTurnConfig
from rlpost.rollout.worker import RolloutWorker
from rlpost.types import Prompt, SampleBlock, Sampling
from rlpost.validation import Section

SINGLE_TURN = SingleTurnConfig(
    temperature=1.0,
    top_p=1.0,
    max_prompt_tokens=8,
    max_response_tokens=16,
    generate_deadline_s=10.0,
    attempt_deadline_s=0.3,
    max_attempts=2,
    max_consecutive_failures=2,
)
REFERENCE = ReferenceRolloutConfig(
    max_prompt_tokens=8, max_response_tokens=16, generate_deadline_s=10.0
)


@pytest.fixture(autouse=True)
def objects(monkeypatch):
    fake = FakeStore()
    monkeypatch.setattr(store, "put", fake.put)
    monkeypatch.setattr(store, "fetch", fake.fetch)
    return fake


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Builds a worker over engines; reward None skips the reward processes."""

    async def build(engines, *, config=SINGLE_TURN, target=SingleTurn, reward=None, **changes):
        tokenizer = changes.pop("tokenizer", FakeTokenizer())
        monkeypatch.setattr(worker_module, "load_tokenizer", lambda path: tokenizer)
        workers = [FakeWorker(engine, rank) for rank, engine in enumerate(engines)]
        arguments = {
            "model_path": "",
            "engines": workers,
            "reward": reward,
            "group_size": 2,
            "seed": 7,
            "run_dir": tmp_path,
        }
        made = RolloutWorker(Section("rollout", target, config), **arguments | changes)
        await made.start()
        return made, workers

    return build


def prompts(count, text="1+1="):
    return [Prompt(f"p/{n}", epoch=0, index=n, text=text, answer="2") for n in range(count)]


def rewards(**modes):
    parts = {name: PartConfig(1.0, section(mode)) for name, mode in modes.items()}
    config = RewardSetConfig(parts, next(iter(modes)), pool_config(timeout_s=0.3))
    return Section("reward", RewardSet, config)


async def groups(worker, asked, **kwargs):
    keys = await worker.begin(asked, **kwargs)
    return [await worker.finish(key) for key in keys]


async def test_a_group_has_every_column_at_the_right_place(make, objects):
    engine = FakeEngine()
    engine.version = 3
    worker, _ = await make([engine], reward=rewards(main="length"))
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


async def test_groups_spread_by_load_in_one_submit_per_engine(make):
    engines = [FakeEngine(), FakeEngine()]
    worker, _ = await make(engines)
    asked = [*prompts(1, text="12345678"), *prompts(4)[1:]]
    await groups(worker, asked)
    shares = [[r.request_id for r in engine.submissions[0]] for engine in engines]
    assert [len(engine.submissions) for engine in engines] == [1, 1]
    assert [name.split("#")[0] for name in shares[0][::2]] == ["train:p/0@0", "train:p/3@0"]
    assert [name.split("#")[0] for name in shares[1][::2]] == ["train:p/1@0", "train:p/2@0"]


async def test_a_prompt_that_is_too_long_fails_under_its_name(make, objects):
    engine = FakeEngine()
    worker, _ = await make([engine])
    long, short = await groups(worker, [*prompts(1, text="123456789"), *prompts(2)[1:]])
    assert (long.failure, long.sample_ids, short.failure) == ("prompt_too_long", (), "")
    assert objects.fetch(long.block).scalars["prompt"].tolist() == ["123456789"]
    assert len(engine.submissions[0]) == 2


async def test_an_aborted_answer_is_not_trained_as_complete(make, objects):
    reasons = iter(["stop", "abort"])
    engine = FakeEngine(lambda request: ([ord("1"), EOS], next(reasons)))
    worker, _ = await make([engine])
    (group,) = await groups(worker, prompts(1))
    assert (group.failure, group.rewards) == ("aborted", ())
    assert objects.fetch(group.block).scalars["finish_reason"].tolist() == ["stop", "abort"]


async def test_a_length_stop_is_marked_truncated(make, objects):
    worker, _ = await make([FakeEngine(lambda request: ([ord("1")] * 3, "length"))])
    (group,) = await groups(worker, prompts(1))
    assert group.finish_reasons == ("length", "length")
    assert objects.fetch(group.block).scalars["truncated"].tolist() == [True, True]


async def test_a_missing_verdict_is_nan_not_zero(make, objects):
    worker, _ = await make([FakeEngine()], reward=rewards(main="length", slow="hang"))
    (group,) = await groups(worker, prompts(1))
    await worker.close()
    assert np.isnan(group.rewards).all() and group.accuracies == (1.0, 1.0)
    assert group.verdict_counts == {"ok": 2, "timeout": 2}
    assert objects.fetch(group.block).scalars["verdict/slow"].tolist() == ["timeout"] * 2


async def test_a_dead_engine_s_groups_are_retried_elsewhere_with_the_same_seeds(make):
    engines = [FakeEngine(), FakeEngine()]
    worker, handles = await make(engines)
    keys = await worker.begin(prompts(2))
    handles[0].dead = True
    assert [(await worker.finish(key)).failure for key in keys] == ["", ""]
    first = [request.seed for request in engines[0].submissions[0]]
    assert [request.seed for request in engines[1].submissions[1]] == first
    await groups(worker, prompts(4)[2:])
    assert len(engines[0].submissions) == 1, "a fenced engine gets no more work"


async def test_when_all_engines_are_dead_no_group_is_tried_any_more(make):
    """A failed group would be drawn again, until a budget is spent."""
    worker, handles = await make([FakeEngine(), FakeEngine()])
    keys = await worker.begin(prompts(2))
    for handle in handles:
        handle.dead = True
    results = [await outcome(worker.finish(key)) for key in keys]
    results.append(await outcome(worker.begin(prompts(3)[2:])))
    assert isinstance(results[-1], WorkerDiedError)
    assert re.search(r"none of 2 engines is alive: .*\[0\].*; .*\[1\]", str(results[-1]))


async def outcome(call):
    """What the call raises, or its result."""
    try:
        return await call
    except RlpostError as error:
        return error


async def test_an_engine_that_hangs_is_left_and_the_group_goes_elsewhere(make):
    class Hanging(FakeEngine):
        async def collect(self, request_ids):
            if not self.aborted:
                await asyncio.sleep(60)
            return await super().collect(request_ids)

    engines = [Hanging(), FakeEngine()]
    worker, _ = await make(engines)
    (group,) = await groups(worker, prompts(1))
    assert group.failure == "" and not engines[0].queued and len(engines[0].aborted) == 2


async def test_a_missing_answer_is_never_filled_by_position(make):
    class Short(FakeEngine):
        async def collect(self, request_ids):
            return (await super().collect(request_ids))[1:]

    worker, _ = await make([Short()])
    (group,) = await groups(worker, prompts(1))
    assert group.failure == "generation_failed"


async def test_generation_that_keeps_failing_stops_the_run(make):
    worker, _ = await make([FakeEngine(lambda request: ([ord("1")], "abort"))])
    first, second = await groups(worker, prompts(2))
    assert first.failure == second.failure == "aborted"
    with pytest.raises(BudgetError, match=r"generation failed 3 times in a row.*aborted"):
        await groups(worker, prompts(1))


async def test_eval_uses_its_own_sampling_and_group_size(make):
    engine = FakeEngine()
    worker, _ = await make([engine])
    greedy = Sampling(temperature=0.0, top_p=1.0, max_tokens=4)
    (group,) = await groups(worker, prompts(1), group_size=1, sampling=greedy, record="eval")
    (request,) = engine.submissions[0]
    assert request.sampling == greedy and len(group.sample_ids) == 1


async def test_a_prompt_can_t_be_begun_or_finished_twice(make):
    worker, _ = await make([FakeEngine()])
    (key,) = await worker.begin(prompts(1))
    with pytest.raises(ValueError, match="p/0@0"):
        await worker.begin(prompts(1))
    await worker.finish(key)
    with pytest.raises(ValueError, match="finished already"):
        await worker.finish(key)


async def test_an_unstable_chat_template_does_not_move_the_border(make, objects):
    """The prompt is never rendered again together with the response."""
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "1"})
    prompt = Prompt("p/0", epoch=0, index=0, messages=chat, completion="2")
    config = dataclasses.replace(REFERENCE, max_prompt_tokens=99)
    worker, _ = await make(
        [], config=config, target=ReferenceRollout, group_size=1, tokenizer=ChatTokenizer()
    )
    (group,) = await groups(worker, [prompt])
    block = objects.fetch(group.block)
    assert block.scalars["prompt"].tolist() == ["[system]s[user]1[assistant]"]
    assert block.tokens["token_ids"][block.tokens["loss_mask"]].tolist() == [ord("2"), EOS]


async def test_a_chat_without_a_template_is_an_error(make):
    worker, _ = await make([FakeEngine()])
    chat = Prompt("p/0", epoch=0, index=0, messages=({"role": "user", "content": "1"},))
    with pytest.raises(DataError, match=r"no chat template; set data\.chat: false"):
        await worker.begin([chat])


async def test_reference_rollouts_are_the_completion_and_its_end_token(make, objects):
    worker, _ = await make(
        [], config=REFERENCE, target=ReferenceRollout, group_size=1, reward=rewards(main="length")
    )
    prompt = dataclasses.replace(prompts(1)[0], completion="1+1=2\n2")
    (group,) = await groups(worker, [prompt], policy_version=5)
    await worker.close()
    block = objects.fetch(group.block)
    assert block.scalars["response"].tolist() == ["1+1=2\n2"]
    assert block.tokens["token_ids"].tolist() == [*map(ord, "1+1=1+1=2\n2"), EOS]
    assert group.loss_tokens == (8,) and group.oldest_version == 5
    assert np.isnan(block.tokens["rollout_logprobs"]).all()
    assert group.rewards == (7.0,)


async def test_reference_rollouts_need_a_completion_a_single_copy_and_no_eval(make):
    reference = {"config": REFERENCE, "target": ReferenceRollout}
    worker, _ = await make([], **reference, group_size=1)
    with pytest.raises(DataError, match=r"'p/0' has no completion.*worked_chain_sum"):
        await groups(worker, prompts(1))
    with pytest.raises(ConfigError, match="~eval"):
        await worker.begin(prompts(1), sampling=Sampling(0.0, 1.0, 4), record="eval")
    with pytest.raises(ConfigError, match="set group_size=1"):
        await make([], **reference, group_size=2)


async def test_characters_outside_the_vocabulary_are_an_error(make):
    worker, _ = await make([FakeEngine()])
    with pytest.raises(DataError, match=r"prompt of 'p/0' holds characters .*'1~'"):
        await worker.begin(prompts(1, text="1~"))


async def test_an_engine_is_needed_to_generate(make):
    with pytest.raises(ConfigError, match="set engine=vllm"):
        await make([])


async def test_samples_hold_every_sample_trained_or_dropped(make, objects, tmp_path):
    worker, _ = await make([FakeEngine()], reward=rewards(main="length", slow="raise"))
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


@pytest.mark.parametrize(
    ("top_p", "passes", "problems"),
    [(0.9, ("old_logprobs",), 1), (1.0, ("old_logprobs",), 0), (0.9, (), 0)],
)
def test_nucleus_sampling_is_refused_where_ratios_are_trained_on(top_p, passes, problems):
    algorithm = SimpleNamespace(config=None, target=lambda config: SimpleNamespace(passes=passes))
    config = dataclasses.replace(SINGLE_TURN, top_p=top_p)
    lines = list(config.conflicts(SimpleNamespace(algorithm=algorithm)))
    assert len(lines) == problems and all("rollout.top_p (0.9)" in line for line in lines)


def test_deadlines_must_leave_room_for_the_attempts():
    with pytest.raises(ValueError, match=r"generate_deadline_s \(10\).*raise it to 40"):
        dataclasses.replace(SINGLE_TURN, attempt_deadline_s=20.0)


HINTED = TeacherContext(
    hint_template="{answer}{prompt}", route_by=None, teachers=("one",), max_length=24
)


def test_the_teachers_prompt_is_tokenised_once_and_travels_with_the_group(make, objects):
    async def act():
        worker, _ = await make([FakeEngine()], teacher=HINTED)
        return await groups(worker, prompts(1))

    (handle,) = asyncio.run(act())
    block = objects.fetch(handle.block)
    assert handle.teacher == "one"
    expected = FakeTokenizer().encode("21+1=")
    assert block.scalars["teacher_prompt_ids"].tolist() == [expected, expected]
    assert block.scalars["prompt_length"].tolist() == [4, 4]


def test_a_hint_too_long_for_the_teacher_fails_its_group_by_that_name(make):
    async def act():
        short = dataclasses.replace(HINTED, max_length=20)
        worker, _ = await make([FakeEngine()], teacher=short)
        return await groups(worker, prompts(1))

    (handle,) = asyncio.run(act())
    assert handle.failure == "hint_too_long"
