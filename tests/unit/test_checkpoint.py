"""A checkpoint is complete, or it is refused by name."""

import errno
import shutil
from types import SimpleNamespace

import pytest

from rlpost.checkpoint import MANIFEST, Checkpointer, verify_manifest, write_manifest
from rlpost.errors import CheckpointError


def checkpoint(directory, step: int):
    folder = directory / f"step_{step:06d}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")
    write_manifest(folder)
    return folder


def test_a_complete_checkpoint_is_accepted(tmp_path):
    verify_manifest(checkpoint(tmp_path, 1))


def test_a_changed_file_is_named_and_the_previous_checkpoint_offered(tmp_path):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    (newer / "actor" / "weights").write_bytes(b"Weights")
    with pytest.raises(CheckpointError, match=f"actor/weights.*{older}"):
        verify_manifest(newer)


def test_a_missing_file_is_named(tmp_path):
    folder = checkpoint(tmp_path, 1)
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks state\.json"):
        verify_manifest(folder)


def test_a_manifest_that_the_disk_lost_is_named(tmp_path):
    folder = checkpoint(tmp_path, 1)
    (folder / MANIFEST).write_text("")
    with pytest.raises(CheckpointError, match=r"damaged: manifest\.json"):
        verify_manifest(folder)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    folder = checkpoint(tmp_path, 1)
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        verify_manifest(folder)


class FakeGroup:
    """Writes one file for each save call."""

    async def call(self, method, path, *, deadline_s):
        from pathlib import Path

        Path(path).mkdir()
        (Path(path) / "part").write_text(method)
        return [None]


async def test_only_the_newest_checkpoints_are_kept(tmp_path):
    config = Checkpointer.Config(save_interval=1, keep_last=2, deadline_s=5.0)
    writer = Checkpointer(config, directory=tmp_path)
    for step in (1, 2, 3):
        await writer.save(
            step, roles={"actor": FakeGroup()}, exports={"hf": "actor"}, state={"step": step}
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


class FullDisk(FakeGroup):
    async def call(self, method, path, *, deadline_s):
        await super().call(method, path, deadline_s=deadline_s)
        raise OSError(errno.ENOSPC, "No space left on device", path)


async def test_a_save_that_fails_leaves_nothing_and_names_the_checkpoint_before(tmp_path):
    config = Checkpointer.Config(save_interval=1, keep_last=2, deadline_s=5.0)
    writer = Checkpointer(config, directory=tmp_path)
    (tmp_path / ".partial_step_000007").mkdir()  # of a driver that was killed
    before = await writer.save(1, roles={"actor": FakeGroup()}, exports={}, state={})
    with pytest.raises(CheckpointError, match=f"step_000002 can't be written.*No space.*{before}"):
        await writer.save(2, roles={"actor": FullDisk()}, exports={}, state={})
    assert [*tmp_path.iterdir()] == [before]


async def test_a_full_disk_is_recognised_behind_other_words(tmp_path, monkeypatch):
    class Torch(FakeGroup):
        async def call(self, method, path, *, deadline_s):
            raise RuntimeError("iostream error")

    config = Checkpointer.Config(save_interval=1, keep_last=2, deadline_s=5.0)
    save = Checkpointer(config, directory=tmp_path).save
    with pytest.raises(RuntimeError, match="iostream error"):
        await save(1, roles={"actor": Torch()}, exports={}, state={})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(CheckpointError, match="the disk is full: iostream error"):
        await save(1, roles={"actor": Torch()}, exports={}, state={})


@pytest.mark.parametrize(
    ("interval", "step", "epoch_end", "last", "due"),
    [(0, 3, False, False, False), (3, 3, False, False, True), (0, 3, True, False, True),
     (0, 3, False, True, True)],
)  # fmt: skip
def test_saves_fall_on_intervals_epoch_ends_and_the_last_step(
    tmp_path, interval, step, epoch_end, last, due
):
    config = Checkpointer.Config(save_interval=interval, keep_last=1, deadline_s=5.0)
    writer = Checkpointer(config, directory=tmp_path)
    assert writer.due(step, epoch_end=epoch_end, last=last) is due
