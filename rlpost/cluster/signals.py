"""The signals with which a scheduler warns a run that its time is almost up, or ends it.

It sends them to every process of a job; only the driver acts on them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Says whether a warning has come. The driver then saves after the step at hand and leaves.

    `term_patience_s` is how long SIGTERM waits for that; with None it doesn't.
    """

    def __init__(self, term_patience_s: float | None = None) -> None:
        self._term_patience_s = term_patience_s
        self._ended = False  # by SIGTERM
        self._number: int | None = None
        self._handlers: dict[int, Any] = {}
        self._mask: set[int] = set()

    @property
    def came(self) -> bool:
        pending = signal.sigpending() & set(WARNINGS)
        return self._ended or self._number is not None or bool(pending)

    def listen(self) -> None:
        """Blocks the signals, in this process and in all that it starts from here on.

        A mask is inherited, a handler is not, and without one these signals end a process. The
        handler is for threads that were there before.
        """
        self._handlers = {number: signal.signal(number, self._note) for number in WARNINGS}
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS))

    def cease(self) -> None:
        while (pending := signal.sigtimedwait(WARNINGS, 0)) is not None:
            self._note(pending.si_signo, None)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    @contextlib.contextmanager
    def before_the_end(self) -> Iterator[None]:
        """Inside, SIGTERM asks to stop, too; it interrupts once it was heeded, or not in time.

        It may have reached workers as well: an error that follows says nothing new.
        """
        if self._term_patience_s is None:
            yield
            return
        interrupt = threading.Timer(self._term_patience_s, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.daemon = True

        def ask(number: int, frame: Any) -> None:
            if not self._ended:
                self._ended = True
                interrupt.start()

        handler = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        except Exception as error:
            if self._ended:
                raise KeyboardInterrupt from error
            raise
        finally:
            interrupt.cancel()
            signal.signal(signal.SIGTERM, handler)

    def pass_on(self, requeue: Callable[[], None]) -> None:
        """To whoever listened before, such as a launcher that queues its job; or to `requeue`."""
        handler = None if self._number is None else self._handlers[self._number]
        if callable(handler):
            handler(self._number, None)
        else:
            requeue()

    def _note(self, number: int, frame: Any) -> None:
        self._number = number


@contextlib.contextmanager
def heeding_warnings(term_patience_s: float | None = None) -> Iterator[StopRequest]:
    """Inside, warnings wait to be asked for; no process that is started inside sees them."""
    request = StopRequest(term_patience_s)
    request.listen()
    try:
        yield request
    finally:
        request.cease()
