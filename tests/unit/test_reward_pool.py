"""The reward pool: a hang, crash or exception is a missing verdict; too many stop the run."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_rewards import pool_config, section

from rlpost.errors import BudgetError
from rlpost.rewards.base import RewardInputs
from rlpost.rewards.budget import FailureBudget
from rlpost.rewards.pool import RewardPool
from rlpost.rewards.reward_set import PartConfig, RewardSet, RewardSetConfig
from rlpost.types import Prompt


def inputs(response):
    return RewardInputs(Prompt("p/1", epoch=0, index=0, text="?"), response, "stop", 3)


@contextlib.asynccontextmanager
async def pool(parts, **changes):
    made = RewardPool(pool_config(**changes), parts)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until_dead(pid, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


async def test_failures_are_verdicts_and_the_next_call_works():
    async with pool({"main": section("mixed")}, timeout_s=0.5) as rewards:
        found = {}
        for response in ("raise", "nan", "crash", "hang", "four"):
            found[response] = (await rewards.score(inputs(response)))["main"]
    assert found["raise"].status == "error" and found["raise"].value is None
    assert "ValueError: bad digit (fake_rewards.py:" in found["raise"].detail
    assert found["nan"].status == "error" and "finite" in found["nan"].detail
    assert found["crash"].status == "error" and "exit code 7" in found["crash"].detail
    assert found["hang"].status == "timeout" and "0.5 s" in found["hang"].detail
    assert (found["four"].status, found["four"].value) == ("ok", 4.0)


async def test_a_hanging_part_does_not_take_the_other_parts_with_it():
    async with pool({"slow": section("hang"), "main": section()}, timeout_s=0.3) as rewards:
        verdicts = await rewards.score(inputs("four"))
    assert (verdicts["slow"].status, verdicts["main"].value) == ("timeout", 4.0)


async def test_a_timeout_kills_the_processes_that_the_reward_started(tmp_path):
    note = tmp_path / "pid"
    parts = {"main": section("hang_with_children", str(note))}
    async with pool(parts, timeout_s=0.5) as rewards:
        await rewards.score(inputs("x"))
    assert wait_until_dead(int(note.read_text()))


async def test_processes_score_side_by_side():
    async with pool({"main": section("pid")}, num_processes=2) as rewards:
        verdicts = await asyncio.gather(*(rewards.score(inputs("x")) for _ in range(20)))
        assert {verdict["main"].value for verdict in verdicts} <= set(map(float, rewards.pids))
        assert len(rewards.pids) == 2


async def test_a_broken_reward_stops_the_run_with_its_last_detail():
    async with pool({"main": section("raise")}, max_consecutive_failures=3) as rewards:
        for _ in range(3):
            await rewards.score(inputs("x"))
        with pytest.raises(BudgetError, match=r"reward 'main' failed 4 times.*bad digit"):
            await rewards.score(inputs("x"))


def test_a_reward_may_fail_only_in_a_share_of_the_last_calls():
    budget = FailureBudget("reward", window=10, max_fraction=0.2, max_consecutive=5)
    for _ in range(2):
        for _ in range(4):
            budget.succeeded()
        budget.failed("odd")
    with pytest.raises(BudgetError, match=r"30% of the last 10 calls \(allowed: 20%\).*: odd"):
        budget.failed("odd")


async def test_a_reward_that_cant_be_built_fails_at_start():
    with pytest.raises(BudgetError, match=r"\(main\) can't be built.*no module named 'sandbox'"):
        async with pool({"main": section("broken_constructor")}):
            pass


async def test_close_ends_every_process_even_a_hanging_one():
    async with pool({"main": section("hang")}, timeout_s=60.0) as rewards:
        call = asyncio.ensure_future(rewards.score(inputs("x")))
        await asyncio.sleep(0.2)
        pids = rewards.pids
    verdict = (await call)["main"]
    assert verdict.status == "error" and all(wait_until_dead(pid) for pid in pids)


def test_processes_die_with_a_killed_parent():
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from fake_rewards import pool_config, section\n"
        "from test_reward_pool import RewardPool, inputs\n"
        "async def main():\n"
        "    pool = RewardPool(pool_config(timeout_s=60.0), {'main': section('hang')})\n"
        "    await pool.start()\n"
        "    print(*pool.pids, flush=True)\n"
        "    await pool.score(inputs('x'))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, os.path.dirname(__file__)], stdout=subprocess.PIPE, text=True
    )
    (child,) = map(int, parent.stdout.readline().split())
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until_dead(child)


async def score_of(parts, response="four"):
    weighted = {name: PartConfig(weight, section(mode)) for name, (weight, mode) in parts.items()}
    rewards = RewardSet(RewardSetConfig(weighted, "main", pool_config(timeout_s=0.3)))
    await rewards.start()
    try:
        return await rewards.score(inputs(response))
    finally:
        await rewards.close()


async def test_the_total_is_the_weighted_sum():
    score = await score_of({"main": (0.5, "length"), "extra": (-1.0, "length")})
    assert (score.total, score.accuracy) == (0.5 * 4 - 4, 1.0)


async def test_a_missing_weighted_part_makes_the_total_missing_not_zero():
    score = await score_of({"main": (1.0, "length"), "extra": (1.0, "hang")})
    assert math.isnan(score.total) and score.accuracy == 1.0


async def test_a_part_of_weight_zero_may_be_missing():
    score = await score_of({"main": (1.0, "length"), "extra": (0.0, "raise")})
    assert score.total == 4.0


def test_accuracy_names_a_part():
    with pytest.raises(
        ValueError, match=r"accuracy \('x'\) must name one of the parts: \['main'\]"
    ):
        RewardSetConfig({"main": PartConfig(1.0, section())}, "x", pool_config())
