"""How a run is asked to stop."""

import asyncio
import signal

import pytest

from rlpost.run import stoppable


@pytest.fixture
def in_the_background():
    """As a shell script starts `command &`: with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, previous)


def test_sigterm_interrupts_a_run_that_a_script_started_in_the_background(in_the_background):
    with pytest.raises(KeyboardInterrupt), stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_sigterm_cancels_the_loop_of_such_a_run(in_the_background):
    cancelled = []

    async def loop():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt), stoppable():
        asyncio.run(loop())
    assert cancelled
