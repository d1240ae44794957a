"""Rewards that misbehave, for the reward pool's tests."""

import os
import subprocess
import time
from dataclasses import dataclass

from rlpost.rewards.pool import PoolConfig
from rlpost.validation import Section


@dataclass(frozen=True)
class FakeConfig:
    mode: str = "length"
    note: str = ""


class Fake:
    """`mode` picks what happens; "mixed" obeys the response."""

    Config = FakeConfig

    def __init__(self, config):
        self.config = config
        if config.mode == "broken_constructor":
            raise ModuleNotFoundError("no module named 'sandbox'")

    def score(self, inputs):
        mode = inputs.response if self.config.mode == "mixed" else self.config.mode
        if mode == "hang":
            while True:
                pass
        if mode == "hang_with_children":
            child = subprocess.Popen(["sleep", "600"])
            with open(self.config.note, "w") as note:
                note.write(str(child.pid))
            time.sleep(600)
        if mode == "raise":
            raise ValueError("bad digit")
        if mode == "crash":
            os._exit(7)
        if mode == "nan":
            return float("nan")
        if mode == "pid":
            return os.getpid()
        print("a reward may print")
        return float(len(inputs.response))


def section(mode="length", note=""):
    return Section("reward", Fake, FakeConfig(mode, note))


def pool_config(**changes):
    fields = {
        "num_processes": 1,
        "timeout_s": 1.0,
        "start_timeout_s": 60.0,
        "failure_window": 100,
        "max_failure_fraction": 1.0,
        "max_consecutive_failures": 100,
    }
    return PoolConfig(**fields | changes)
