"""What is kept beside the metrics: the environment, the code's state, excerpts, wills."""

import io
import json
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.tracking import environment
from rlpost.tracking.excerpts import spread, write_excerpts
from rlpost.tracking.guard import Guard, Will, left_behind
from rlpost.tracking.last_files import write_last_files


def git(folder, *arguments):
    identity = ["-c", "user.name=me", "-c", "user.email=me@host"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def test_variables_that_matter_are_kept_and_secrets_are_not():
    given = {
        "CUDA_VISIBLE_DEVICES": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ADDRESS": "ray://me:secret@host:10001",
        "HF_TOKEN": "hf_1",
        "MLFLOW_TRACKING_PASSWORD": "1",
        "RAY_API_KEY": "1",
        "HOME": "/root",
    }
    assert environment.variables(given) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "RAY_ADDRESS": "ray://***@host:10001",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_commit_branch_and_changes_of_a_checkout_are_known(tmp_path):
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a.py").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert environment.git_diff(tmp_path) == b""
    (tmp_path / "a.py").write_text("two\n")
    (tmp_path / "new.py").write_text("")
    state = environment.git_state(tmp_path)
    assert (len(state["commit"]), state["branch"]) == (40, "trunk")
    assert state["changed"] == [" M a.py", "?? new.py"]
    assert b"-one\n+two" in environment.git_diff(tmp_path)


def test_without_a_checkout_or_without_git_there_is_no_state(tmp_path, monkeypatch):
    assert environment.git_state(tmp_path) is None
    assert environment.git_diff(tmp_path) == b""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_state(environment.CODE) is None


def test_the_environment_is_one_json_file(tmp_path):
    written = environment.write_environment(tmp_path)
    kept = json.loads(written[0].read_text())
    assert kept["python"].startswith("3.") and "torch" in kept["packages"]
    assert {path.name for path in written} <= {"environment.json", "git.diff"}


def samples(folder, step, rewards):
    rows = [
        {
            "sample_id": f"p{number}#0",
            "prompt": f"1+{number}=",
            "response": f"first\n{number + 1}",
            "answer": str(number + 1),
            "reward": reward,
            "reason": "trained",
            "token_ids": [1, 2, 3],
        }
        for number, reward in enumerate(rewards)
    ]
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"step_{step:06d}.parquet")


def test_excerpts_show_the_first_and_the_last_step_as_text(tmp_path):
    for step in (1, 2, 10):
        samples(tmp_path / "samples", step, [0.0, 1.0, 0.25, 0.5, 0.75])
    write_excerpts(tmp_path)
    files = sorted((tmp_path / "excerpts").iterdir())
    assert [file.name for file in files] == ["step_000001.txt", "step_000010.txt"]
    text = files[1].read_text()
    assert text.startswith("=== p0#0  reason trained  reward 0.0\n--- prompt\n1+0=\n--- response\n")
    assert "=== p1#0  reason trained  reward 1.0" in text and "token_ids" not in text


def test_excerpts_span_the_rewards_and_those_without_one_come_last():
    rows = [{"reward": value} for value in (0.5, float("nan"), 0.0, 1.0, 0.25, None)]
    assert [row["reward"] for row in spread(rows)][:3] == [0.0, 0.25, 1.0]
    assert spread([{"reward": 1.0}]) == [{"reward": 1.0}]
    assert spread([]) == []


def test_a_run_that_ended_before_its_first_sample_has_a_timeline_only(tmp_path):
    assert [path.name for path in write_last_files(tmp_path)] == ["timeline.json"]


def test_the_wills_count_unless_there_was_a_goodbye():
    will = '{"function": "a.b", "arguments": {"x": 1}}\n'
    assert left_behind(io.StringIO(will)) == [Will("a.b", {"x": 1})]
    assert left_behind(io.StringIO(will + '{"functi')) == [Will("a.b", {"x": 1})]
    assert left_behind(io.StringIO(will + '"goodbye"\n')) == []
    assert left_behind(io.StringIO("")) == []


@pytest.mark.parametrize("closed", [True, False])
def test_what_a_second_ctrl_c_keeps_from_being_closed_is_left_to_the_guard(tmp_path, closed):
    with pytest.raises(KeyboardInterrupt), Guard(tmp_path / "guard.log") as guard:
        guard.add(Will("os.mkdir", {"path": str(tmp_path / "carried_out")}))
        if closed:
            guard.dismiss()
        raise KeyboardInterrupt
    guard._process.wait(30)
    assert (tmp_path / "carried_out").exists() is not closed


def test_a_guard_that_is_gone_is_a_warning(tmp_path, caplog):
    with Guard(tmp_path / "guard.log") as guard:
        guard._process.kill()
        guard._process.wait()
        guard.add(Will("a.b", {}))
        guard.dismiss()
    assert "trackers will show it as running" in caplog.text
