"""The rollout worker in a process of its own, with engine handles, store and reward processes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hosted_engine import EchoEngine
from omegaconf import OmegaConf

from rlpost.cluster import store
from rlpost.cluster.local import LocalCluster, LocalClusterConfig
from rlpost.cluster.workers import Placement
from rlpost.config import build
from rlpost.models.characters import character_tokenizer, vocabulary
from rlpost.rollout.worker import RolloutWorker
from rlpost.validation import Section, Validator

CONF = Path(__file__).parents[2] / "conf"
ONE_CPU = Placement(1, 0, {"OMP_NUM_THREADS": "1"})


@dataclass(frozen=True)
class Sections:
    data: Section
    rollout: Section
    reward: Section


def sections():
    files = {"data": "chain_sum", "rollout": "single_turn", "reward": "reasoning_gym"}
    nodes = {
        group: OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
        for group, name in files.items()
    }
    validator = Validator(["rlpost."])
    made = validator.validate(Sections, nodes)
    assert validator.problems == []
    return made


def children_of(pid):
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
async def test_groups_travel_by_reference_and_reward_processes_die_with_the_worker(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # workers import hosted_engine
    config = sections()
    tokenizer = character_tokenizer(vocabulary("0123456789+-=\n", 24), max_length=64)
    tokenizer.save_pretrained(tmp_path / "model")
    source = build(config.data, seed=1)
    cluster = LocalCluster(LocalClusterConfig(4, 0, 100_000_000, 120.0, {}), log_dir=tmp_path)
    with cluster.running():
        engines = [cluster.spawn(role="engine", rank=n, placement=ONE_CPU) for n in range(2)]
        for engine in engines:
            answer = [tokenizer.encode("1")[0], tokenizer.eos_token_id]
            await engine.create(EchoEngine, answer, {}, deadline_s=60.0)
        worker = cluster.spawn(role="rollout", rank=0, placement=ONE_CPU)
        arguments = {
            "model_path": str(tmp_path / "model"),
            "engines": engines,
            "reward": config.reward,
            "group_size": 4,
            "seed": 1,
            "run_dir": tmp_path,
        }
        await worker.create(RolloutWorker, [config.rollout], arguments, deadline_s=60.0)
        await worker.call("start", deadline_s=120.0)

        prompts = [source.get(0, index) for index in range(16)]
        keys = await worker.call("begin", prompts, deadline_s=30.0)
        groups = [await worker.call("finish", key, deadline_s=60.0) for key in keys]
        for prompt, group in zip(prompts, groups, strict=True):
            assert group.failure == "" and group.oldest_version == 2
            assert group.accuracies == (float(prompt.answer == "1"),) * 4
        block = store.fetch(groups[0].block)
        assert block.scalars["prompt"].tolist() == [prompts[0].text] * 4
        assert np.isfinite(block.tokens["rollout_logprobs"][block.tokens["loss_mask"]]).all()

        entries = [(group, "trained") for group in groups]
        blocks = tuple(group.block for group in groups)
        path = await worker.call("write_samples", 1, entries, blocks, deadline_s=60.0)
        assert pq.read_table(path).num_rows == 64

        pid = await worker.pid()
        rewards = children_of(pid)
        assert rewards and all(alive(child) for child in rewards)
        os.kill(pid, 9)
        deadline = time.monotonic() + 10
        while any(alive(child) for child in rewards) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(alive(child) for child in rewards)
