"""What is committed together: weights, optimizer, data position, policy version, export.

A checkpoint is a folder `step_000123` with `manifest.json`, written last: it lists every file with
its size and sha256. The folder is built under a hidden name and renamed when complete, so a
half-written one can't be chosen.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlpost.errors import CheckpointError

if TYPE_CHECKING:
    from rlpost.cluster.workers import WorkerGroup

MANIFEST = "manifest.json"
STATE = "state.json"
FULL_BYTES = 1 << 22  # what a write that the disk has no room for leaves free, at most
PARTIAL = ".partial_"  # begins the name of a folder that is not complete yet


@dataclass(frozen=True)
class CheckpointerConfig:
    """`save_interval` and `keep_last` count steps and folders; `deadline_s` bounds each part."""

    save_interval: NonNegativeInt
    keep_last: PositiveInt
    deadline_s: PositiveFloat


class Checkpointer:
    """Writes and reads the checkpoints of one run."""

    Config = CheckpointerConfig

    def __init__(self, config: CheckpointerConfig, *, directory: Path) -> None:
        self.config = config
        self.directory = directory

    def due(self, step: int, *, epoch_end: bool, last: bool) -> bool:
        """Whether a save follows after `step` finished steps."""
        interval = self.config.save_interval
        return last or epoch_end or (interval > 0 and step % interval == 0)

    async def save(
        self,
        step: int,
        *,
        roles: Mapping[str, WorkerGroup],
        exports: Mapping[str, str],
        state: Mapping[str, Any],
    ) -> Path:
        """Saves every role, the Hugging Face `exports` (folder -> role), and the driver's state.

        Raises CheckpointError where it can't be written; the unfinished folder is removed, so that
        what filled the disk does not stay.
        """
        final = self.directory / f"step_{step:06d}"
        partial = self.directory / f"{PARTIAL}{final.name}"
        try:
            self._clear()
            partial.mkdir(parents=True)
            await self._write(partial, roles, exports)
            # Hashing many gigabytes takes a while, in which other tasks of the driver go on.
            await asyncio.to_thread(self._commit, partial, final, state)
        except Exception as error:
            # torch says "iostream error" of a full disk.
            full = "the disk is full: " if is_full(self.directory) else ""
            self._clear()
            if full or isinstance(error, OSError):
                raise CheckpointError(
                    f"{final} can't be written: {full}{error}{_older(final)}"
                ) from error
            raise
        return final

    async def _write(
        self, folder: Path, roles: Mapping[str, WorkerGroup], exports: Mapping[str, str]
    ) -> None:
        deadline_s = self.config.deadline_s
        for role, group in roles.items():
            await group.call("save", str(folder / role), deadline_s=deadline_s)
        for name, role in exports.items():
            await roles[role].call("save_hf", str(folder / name), deadline_s=deadline_s)

    def _clear(self) -> None:
        """Takes away what saves that failed, here or in a driver that was killed, have left."""
        for left in self.directory.glob(f"{PARTIAL}*"):
            shutil.rmtree(left, ignore_errors=True)

    async def load(self, folder: Path, *, roles: Mapping[str, WorkerGroup]) -> dict[str, Any]:
        """Restores every role and returns the driver's state. Raises CheckpointError."""
        await asyncio.to_thread(verify_manifest, folder)
        for role, group in roles.items():
            await group.call("load", str(folder / role), deadline_s=self.config.deadline_s)
        return saved_state(folder)

    def _commit(self, partial: Path, final: Path, state: Mapping[str, Any]) -> None:
        (partial / STATE).write_text(json.dumps(state))
        write_manifest(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        self._prune()

    def _prune(self) -> None:
        for folder in complete(self.directory)[: -self.config.keep_last]:
            shutil.rmtree(folder)


def is_full(directory: Path) -> bool:
    return directory.is_dir() and shutil.disk_usage(directory).free < FULL_BYTES


def complete(directory: Path) -> list[Path]:
    """The checkpoints below a run's `checkpoints` folder, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step_*/{MANIFEST}"))


def saved_state(folder: Path) -> dict[str, Any]:
    """The driver's state. Raises CheckpointError for a folder that is no complete checkpoint."""
    require_complete(folder)
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {STATE}: {error}{_older(folder)}") from error
    return state


def saved_step(folder: Path) -> int:
    """Steps that were finished when it was saved. Raises CheckpointError."""
    return int(saved_state(folder)["step"])


def write_manifest(folder: Path) -> None:
    """Lists every file below `folder`, then appears by atomic rename."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    draft = folder / f".{MANIFEST}"
    draft.write_text(json.dumps({"files": files}, indent=1))
    os.replace(draft, folder / MANIFEST)


def verify_manifest(folder: Path) -> None:
    """Raises CheckpointError naming the part that is missing or damaged, and an older one."""
    require_complete(folder)
    for name, entry in _listed(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks {name}{_older(folder)}")
        if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{folder} is damaged: {name} has changed{_older(folder)}")


def _listed(folder: Path) -> dict[str, Any]:
    try:
        files: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {MANIFEST}: {error}{_older(folder)}"
        ) from error
    return files


def require_complete(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is no complete checkpoint: it has no {MANIFEST}{_older(folder)}"
        )


def _older(folder: Path) -> str:
    others = [path for path in complete(folder.parent) if path.name < folder.name]
    return f"; the previous complete one is {others[-1]}" if others else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
