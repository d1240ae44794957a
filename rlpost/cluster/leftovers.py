"""The processes that a Ray of our own leaves behind.

Ray kills a raylet that does not end within a second. Its agents then notice by themselves, and try
for a minute to tell a head that has gone, too. Nobody is their parent any more, and Ray writes
their names over their command lines and environments; but their logs tell whose they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 20.0  # a process that holds much memory takes seconds to die
LOOK_EVERY_S = 0.05


def end_writers_to(folder: str) -> None:
    """Kills all processes but this one that write to files below `folder`, and waits for that."""
    end = time.monotonic() + END_TIMEOUT_S
    while writers := list(writers_to(folder)):
        if time.monotonic() > end:
            logger.warning("processes of Ray do not die: %s", writers)
            return
        for pid in writers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def writers_to(folder: str) -> Iterator[int]:
    """Ids of the processes, of those whose files may be seen."""
    below = os.path.join(os.path.realpath(folder), "")
    for process in Path("/proc").glob("[0-9]*"):
        files = _written_files(process)
        if int(process.name) != os.getpid() and any(file.startswith(below) for file in files):
            yield int(process.name)


def _written_files(process: Path) -> Iterator[str]:
    """Paths of its files that are open for writing; none where it is another user's, or dead."""
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):  # closed in this moment
                if descriptor.stat(follow_symlinks=False).st_mode & stat.S_IWUSR:
                    yield os.readlink(descriptor.path)
