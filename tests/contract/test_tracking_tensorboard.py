"""TensorBoard's own reader finds what a run wrote."""

import subprocess
import sys

import pytest

from rlpost.checks import check
from rlpost.composition import compose_node
from rlpost.config import load
from rlpost.errors import ConfigError
from rlpost.tracking import tensorboard

RUN = """
import sys
from pathlib import Path
from rlpost.tracking.tensorboard import TensorboardTracker, TensorboardTrackerConfig
folder = Path(sys.argv[1])
config = TensorboardTrackerConfig(max_queued=100, start_timeout_s=120.0, close_timeout_s=60.0)
tracker = TensorboardTracker(config, resume_run_id=None, leave_will=print)
tracker.start(run_name="r", run_dir=folder, params={})
(folder / "config.yaml").write_text("seed: 1\\n")
(folder / "excerpts").mkdir()
(folder / "excerpts" / "step_000001.txt").write_text("=== p0#0\\n")
for path in ("config.yaml", "excerpts"):
    tracker.artifact(folder / path)
for step in range(3):
    tracker.log(step, {"rollout/reward/mean": step / 2, "train/loss": float("nan")})
tracker.close("FINISHED")
assert not {"torch", "tensorflow"} & set(sys.modules)
"""


def test_curves_and_texts_can_be_read(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["rollout/reward/mean"]
    points = [(point.step, point.value) for point in events.Scalars("rollout/reward/mean")]
    assert points == [(0, 0.0), (1, 0.5), (2, 1.0)]
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert texts == {
        "config.yaml": "```\nseed: 1\n\n```",
        "excerpts/step_000001": "```\n=== p0#0\n\n```",
        "status": "FINISHED",
    }


def test_a_missing_package_is_found_before_the_run(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; install the extra.*\[tensorboard\]"):
        check(load(compose_node(["tracking=[mlflow,tensorboard]"])))
