"""The process that runs rewards. Speaks with its parent over one inherited connection.

In:  {part: Section} once, then (part, RewardInputs or StepInputs) for each call.
Out: a Verdict for each; the first says whether the rewards could be built.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rlpost.rewards.base import RewardInputs, StepInputs
from rlpost.types import Verdict

PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    connection = Connection(descriptor)
    try:
        parts = connection.recv()
        rewards = {name: section.target(section.config) for name, section in parts.items()}
    except Exception as error:  # whatever a reward's import or constructor raises is the answer
        connection.send(Verdict(None, "error", describe(error)))
        return
    connection.send(Verdict(0.0))
    serve(connection, rewards)


def serve(connection: Connection, rewards: dict[str, Any]) -> None:
    """Answers until the parent closes its end."""
    while True:
        try:
            part, inputs = connection.recv()
        except EOFError:
            return
        connection.send(judge(rewards[part], inputs))


def judge(reward: Any, inputs: RewardInputs | StepInputs) -> Verdict:
    """`reward` is a Reward, or a program that scores steps where StepInputs are given."""
    try:
        if isinstance(inputs, StepInputs):
            return step_verdict(reward.score_steps(inputs), len(inputs.steps))
        value = float(reward.score(inputs))
    except Exception as error:  # a reward is foreign code: any failure is its verdict
        return Verdict(None, "error", describe(error))
    if not math.isfinite(value):
        return Verdict(None, "error", f"score() returned {value}; a finite number is wanted")
    return Verdict(value)


def step_verdict(scores: Sequence[float | None], count: int) -> Verdict:
    """Scores of steps as a verdict; a None is a missing one. One score for each step is wanted."""
    if len(scores) != count:
        return Verdict(None, "error", f"score_steps() gave {len(scores)} scores for {count} steps")
    steps = tuple(math.nan if score is None else float(score) for score in scores)
    if any(score is not None and not math.isfinite(score) for score in scores):
        return Verdict(None, "error", f"score_steps() returned {steps}; finite or None is wanted")
    return Verdict(None, steps=steps)


def describe(error: BaseException) -> str:
    """`ValueError: bad digit (my_reward.py:17)`: what, and the innermost line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        file = os.path.basename(trace.tb_frame.f_code.co_filename)
        place = f" ({file}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def die_with_parent(parent_pid: int) -> None:
    """The kernel ends this process with its parent, even inside a call that never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
