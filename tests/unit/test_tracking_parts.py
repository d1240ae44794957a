"""Timeline, console and the composition of trackers."""

import io
import json
import math

import pytest
from rich.console import Console

from rlpost.errors import TrackingError
from rlpost.tracking.console import ConsoleTracker, duration, step_line
from rlpost.tracking.files import FilesTracker
from rlpost.tracking.history import HistoryTracker
from rlpost.tracking.multi import MultiTracker
from rlpost.tracking.timeline import Timeline


class Recording:
    """A tracker that notes its calls, and fails in those named in `broken`."""

    def __init__(self, *broken):
        self.broken = broken
        self.calls = []

    def _note(self, name, value=None):
        self.calls.append((name, value) if value else name)
        if name in self.broken:
            raise OSError(f"{name} is broken")

    def start(self, *, run_name, run_dir, params):
        self._note("start")

    def log(self, step, metrics):
        self._note("log", step)

    def artifact(self, path):
        self._note("artifact", path)

    def close(self, status):
        self._note("close", status)

    def report(self):
        return {"calls": str(len(self.calls))}


def test_every_tracker_is_closed_although_one_fails(tmp_path):
    first, second, summaries = Recording("close"), Recording(), []
    multi = MultiTracker(
        [first, second], {}, summary=lambda status, rows: summaries.append(status), last_files=list
    )
    multi.start(run_name="r", run_dir=tmp_path, params={})
    with pytest.raises(OSError, match="close is broken"):
        multi.close("KILLED")
    assert second.calls[-1] == ("close", "KILLED")
    assert summaries == ["KILLED"]


def test_closing_twice_closes_each_tracker_once(tmp_path):
    tracker = Recording()
    multi = MultiTracker([tracker], {}, summary=lambda status, rows: None, last_files=list)
    multi.start(run_name="r", run_dir=tmp_path, params={})
    multi.close("FINISHED")
    multi.close("FAILED")
    assert tracker.calls == ["start", ("close", "FINISHED")]


def test_a_tracker_that_cannot_start_leaves_the_others_closable(tmp_path):
    first, second = Recording(), Recording("start")
    multi = MultiTracker(
        [first], {"second": second}, summary=lambda status, rows: None, last_files=list
    )
    with pytest.raises(OSError, match="start is broken"):
        multi.start(run_name="r", run_dir=tmp_path, params={})
    multi.close("FAILED")
    assert first.calls == ["start", ("close", "FAILED")]
    assert second.calls == ["start"]


def test_trouble_of_a_chosen_tracker_is_one_warning_and_the_others_go_on(tmp_path, caplog):
    first, second = Recording("log", "artifact"), Recording()
    chosen = {"mine": first, "other": second}
    multi = MultiTracker([], chosen, summary=lambda status, rows: None, last_files=list)
    multi.start(run_name="r", run_dir=tmp_path, params={})
    multi.log(1, {})
    multi.log(2, {})
    multi.artifact(tmp_path)
    assert second.calls[1:] == [("log", 1), ("log", 2), ("artifact", tmp_path)]
    assert [record.getMessage() for record in caplog.records] == [
        "tracking.mine: OSError: log is broken"
    ]


def test_a_chosen_tracker_that_could_not_start_ends_the_run():
    tracker = Recording()
    tracker.log = lambda step, metrics: raise_(TrackingError("no database"))
    multi = MultiTracker([], {"mine": tracker}, summary=lambda status, rows: None, last_files=list)
    with pytest.raises(TrackingError, match="no database"):
        multi.log(0, {})


def raise_(error):
    raise error


def test_a_span_is_recorded_also_when_it_raises(tmp_path):
    begun = []
    timeline = Timeline(tmp_path / "run" / "events.jsonl", on_start=begun.append)
    with pytest.raises(RuntimeError), timeline.span("train", step=3):
        raise RuntimeError("rank 1 died")
    (event,) = timeline.events()
    assert (event["name"], event["lane"], event["step"]) == ("train", "driver", 3)
    assert event["end"] >= event["start"]
    assert begun == ["train"]


def test_chrome_trace_has_a_row_for_each_lane(tmp_path):
    timeline = Timeline(tmp_path / "events.jsonl")
    timeline.add("generate", 10.0, 12.5, lane="engine[0]", tokens=7)
    timeline.add("train", 12.5, 13.0)
    timeline.export_chrome(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["engine[0]", "driver"]
    generate = next(e for e in events if e["name"] == "generate")
    assert (generate["ts"], generate["dur"], generate["args"]) == (10e6, 2.5e6, {"tokens": 7})


def test_a_line_that_a_killed_driver_did_not_finish_is_left_out(tmp_path):
    timeline = Timeline(tmp_path / "events.jsonl")
    timeline.add("train", 1.0, 2.0)
    with timeline.path.open("a") as file:
        file.write('{"name": "publi')
    assert [event["name"] for event in timeline.events()] == ["train"]


def test_chosen_trackers_get_the_last_files_before_they_are_closed(tmp_path):
    tracker, trace = Recording(), tmp_path / "timeline.json"
    multi = MultiTracker(
        [], {"mine": tracker}, summary=lambda status, rows: None, last_files=lambda: [trace]
    )
    multi.start(run_name="r", run_dir=tmp_path, params={})
    multi.close("FAILED")
    assert tracker.calls == ["start", ("artifact", trace), ("close", "FAILED")]


def test_last_files_that_cannot_be_written_close_nothing_less(tmp_path):
    tracker = Recording()
    broken = lambda: raise_(OSError("disk is full"))  # noqa: E731
    multi = MultiTracker(
        [], {"mine": tracker}, summary=lambda status, rows: None, last_files=broken
    )
    multi.start(run_name="r", run_dir=tmp_path, params={})
    with pytest.raises(OSError, match="disk is full"):
        multi.close("FINISHED")
    assert tracker.calls[-1] == ("close", "FINISHED")


def test_a_run_that_goes_on_is_compared_by_all_its_values(tmp_path):
    files, history = FilesTracker(), HistoryTracker()
    files.start(run_name="r", run_dir=tmp_path, params={})
    files.log(1, {"eval/a/accuracy": 0.9, "train/loss": math.nan})
    files.log(2, {"eval/a/accuracy": math.inf})
    history.start(run_name="r", run_dir=tmp_path, params={})
    history.log(3, {"eval/a/accuracy": 0.1})
    assert history.values["eval/a/accuracy"] == [0.9, math.inf, 0.1]
    assert math.isnan(history.values["train/loss"][0])


def test_report_names_the_newest_checkpoint_by_number(tmp_path):
    for step in ("step_2", "step_10", "step_9.tmp"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    tracker = FilesTracker()
    tracker.start(run_name="r", run_dir=tmp_path, params={})
    assert tracker.report()["checkpoint"].endswith("step_10")


def test_plain_console_prints_one_line_a_step_and_a_summary(tmp_path):
    out = io.StringIO()
    tracker = ConsoleTracker(num_steps=2, console=Console(file=out, soft_wrap=True, width=60))
    tracker.start(run_name="grpo", run_dir=tmp_path, params={})
    tracker.phase("starting engines")
    tracker.log(0, {"eval/chain_sum/accuracy": 0.125})
    tracker.phase("train")
    tracker.log(1, {"rollout/reward/mean": 0.5, "perf/generated_tokens_per_s": 1204.4})
    tracker.log(2, {"rollout/reward/mean": 0.75, "eval/chain_sum/accuracy": 0.625})
    tracker.close("FINISHED")
    command = "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db  [and no markup]"
    tracker.summary("FINISHED", dict(tracker.report()) | {"MLflow UI": command})
    lines = out.getvalue().splitlines()
    assert lines[1:3] == ["starting engines ...", "step 0/2  eval chain_sum 0.125"]
    assert lines[3].startswith("step 1/2  reward 0.500  1,204 tokens/s")
    assert lines[4] == "step 2/2  reward 0.750  eval chain_sum 0.625"
    assert "FINISHED at step 2/2" in lines[6]
    assert lines[7].split() == ["first", "last"]
    assert lines[8].split() == ["held-out", "accuracy", "(chain_sum)", "0.125", "0.625"]
    assert lines[9].split() == ["reward", "0.500", "0.750"]
    assert lines[10].endswith(command)


def test_line_shows_what_is_left():
    line = step_line(3, 20, {"rollout/accuracy/mean": 0.4}, remaining_s=70.0)
    assert line == "step  3/20  accuracy 0.400  1m 10s left"
    assert duration(3725) == "1h 02m"
