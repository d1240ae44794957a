"""How the tasks of a job find the one that leads, and learn when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rlpost.errors import ClusterError

LOOK_EVERY_S = 0.2
CONNECT_TIMEOUT_S = 10.0


class Meeting:
    """The leader's end. It writes its place to a file that all tasks see; the others connect.

    They are told Ray's address once it is there. When the leader ends, however it ends, the
    connections close: that is how the others know. One thread accepts connections; it ends when
    the listening socket closes. `secret` is in the file alone, which only its owner can read.
    """

    def __init__(self, file: Path, address: str, *, secret: str) -> None:
        self._file = file
        self._secret = secret
        self._listener = socket.create_server((address, 0))
        self._lock = threading.Lock()
        self._guests: list[socket.socket] = []
        self._message = b""
        self._closed = False

    def open(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(".draft")
        draft.touch(mode=0o600)
        host, port = self._listener.getsockname()[:2]
        draft.write_text(json.dumps({"host": host, "port": port, "secret": self._secret}))
        os.replace(draft, self._file)
        threading.Thread(target=self._accept, daemon=True).start()

    def announce(self, ray_address: str) -> None:
        with self._lock:
            self._message = f"{ray_address}\n".encode()
            for guest in self._guests:
                _send(guest, self._message)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError):  # wakes the thread that accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for guest in self._guests:
                guest.close()

    def _accept(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._closed:
                    guest.close()
                    return
                self._guests.append(guest)
                if self._message:
                    _send(guest, self._message)


def _send(guest: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # a guest that has gone is missed by Ray
        guest.sendall(message)


class Guest:
    """The end of a task that does not lead."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self.secret = secret
        self._connection = connection
        self._stream = connection.makefile()

    def ray_address(self) -> str | None:
        """Waits for it; None when the leader ends before there is one."""
        try:
            return self._stream.readline().strip() or None
        except ConnectionError:  # it ended before it accepted the connection
            return None

    def leader_has_ended(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the end."""
        self._connection.settimeout(timeout_s)
        try:
            return self._connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:  # its process was killed
            return True


@contextlib.contextmanager
def joined(file: Path, deadline_s: float) -> Iterator[Guest]:
    """Raises ClusterError when the leader is not there in time."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            place = json.loads(file.read_text())
            connection = socket.create_connection((place["host"], place["port"]), CONNECT_TIMEOUT_S)
            break
        except OSError as error:  # not there yet, gone, or no way to its node for a moment
            if time.monotonic() > end:
                raise ClusterError(
                    f"the first task did not show up at {file} within {deadline_s:g} s ({error}); "
                    "all tasks need the same hydra.run.dir (with -m: hydra.sweep.dir), on a file "
                    "system that they share"
                ) from error
            time.sleep(LOOK_EVERY_S)
    connection.settimeout(None)
    with connection:
        yield Guest(connection, place["secret"])
