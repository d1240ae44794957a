"""Folders that are built once: complete or absent, and never built by two processes together."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpost.errors import ModelError


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns `target`, which `build(empty folder)` fills if it does not exist yet.

    The folder appears under its name by one rename, after `build` has returned; a build that
    raises or is killed leaves no `target`, and its leftovers go when the next one starts.
    """
    if target.is_dir():
        return target
    with exclusive(target):
        if target.is_dir():
            return target
        unfinished = sibling(target, "unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        build(unfinished)
        os.replace(unfinished, target)
    return target


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Holds the lock of `target`; says so when it has to wait. A dead process holds no lock."""
    lock = sibling(target, "lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("a+")  # not "w", which would empty the holder's note
    except OSError as error:
        raise ModelError(
            f"the model cache {target.parent} can't be written ({error}); set output_dir to a "
            "folder that can"
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"[model] waiting for {target}, which is built by {holder(lock)}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        yield


def holder(lock: Path) -> str:
    """Who holds the lock, as it noted there itself."""
    return lock.read_text() or "another process"


def sibling(target: Path, suffix: str) -> Path:
    """A name beside `target`, thus on its file system: renames between the two are atomic."""
    return target.with_name(f".{target.name}.{suffix}")


def key_of(settings: Mapping[str, Any]) -> str:
    """Short hash of plain settings, for a folder's name."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
