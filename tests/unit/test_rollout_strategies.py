"""Strategies of rollouts, and the border between prompt and response."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import EOS, ChatTokenizer, FakeEngine
from rollout_rig import REFERENCE, SINGLE_TURN, groups, prompts, rewards

from rlpost.errors import ConfigError, DataError
from rlpost.rollout.reference import ReferenceRollout
from rlpost.types import Prompt, Sampling


async def test_an_unstable_chat_template_does_not_move_the_border(make_worker, objects):
    """The prompt is never rendered again together with the response."""
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "1"})
    prompt = Prompt("p/0", epoch=0, index=0, messages=chat, completion="2")
    config = dataclasses.replace(REFERENCE, max_prompt_tokens=99)
    worker = await make_worker(
        [], config=config, target=ReferenceRollout, group_size=1, tokenizer=ChatTokenizer()
    )
    (group,) = await groups(worker, [prompt])
    block = objects.fetch(group.block)
    assert block.scalars["prompt"].tolist() == ["[system]s[user]1[assistant]"]
    assert block.tokens["token_ids"][block.tokens["loss_mask"]].tolist() == [ord("2"), EOS]


async def test_a_chat_without_a_template_is_an_error(make_worker):
    worker = await make_worker([FakeEngine()])
    chat = Prompt("p/0", epoch=0, index=0, messages=({"role": "user", "content": "1"},))
    with pytest.raises(DataError, match=r"no chat template; set data\.chat: false"):
        await worker.begin([chat])


async def test_characters_outside_the_vocabulary_are_an_error(make_worker):
    worker = await make_worker([FakeEngine()])
    with pytest.raises(DataError, match=r"prompt of 'p/0' holds characters .*'1~'"):
        await worker.begin(prompts(1, text="1~"))


async def test_reference_rollouts_are_the_completion_and_its_end_token(make_worker, objects):
    worker = await make_worker(
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


async def test_reference_rollouts_need_a_completion_a_single_copy_and_no_eval(make_worker):
    reference = {"config": REFERENCE, "target": ReferenceRollout}
    worker = await make_worker([], **reference, group_size=1)
    with pytest.raises(DataError, match=r"'p/0' has no completion.*worked_chain_sum"):
        await groups(worker, prompts(1))
    with pytest.raises(ConfigError, match="~eval"):
        await worker.begin(prompts(1), sampling=Sampling(0.0, 1.0, 4), record="eval")
    with pytest.raises(ConfigError, match="set group_size=1"):
        await make_worker([], **reference, group_size=2)


async def test_an_engine_is_needed_to_generate(make_worker):
    with pytest.raises(ConfigError, match="set engine=vllm"):
        await make_worker([])


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
