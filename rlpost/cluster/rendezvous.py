"""Where the ranks of a role meet to form a process group."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A socket that the process of rank 0 holds and already listens at.

    A port that is only looked up can be taken by another process before it is used; this one
    stays with its owner, who hands `listen_fd` (a file descriptor of that process) to the store.
    """

    address: str
    port: int
    listen_fd: int

    @classmethod
    def listening(cls, address: str) -> Rendezvous:
        """At a free port of `address`, in this process."""
        listener = socket.create_server((address, 0))
        port = int(listener.getsockname()[1])
        return cls(address, port, listener.detach())
