"""The socket at which the ranks of a role meet."""

from __future__ import annotations

import os
import socket

import pytest

from rlpost.cluster.rendezvous import Rendezvous


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_its_port_is_nobody_elses_before_the_ranks_meet(address: str) -> None:
    made = Rendezvous.listening("127.0.0.1")
    try:
        with pytest.raises(OSError, match="in use"):
            socket.create_server((address, made.port))
    finally:
        os.close(made.listen_fd)


def test_ranks_reach_it_before_its_owner_is_ready_for_them() -> None:
    made = Rendezvous.listening("127.0.0.1")
    try:
        socket.create_connection((made.address, made.port), timeout=5).close()
    finally:
        os.close(made.listen_fd)
