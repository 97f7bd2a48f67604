"""The queue of commands that other threads have for the engine thread, with the order to stop."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from edged.engine.request import EngineStopping

log = logging.getLogger("edged.engine")
_STOPPING_WAIT_S = 0.01
"""Seconds between two checks, while stopping, of whether all requests have ended or the deadline has passed."""
STOPPING = "the daemon is stopping"
"""The reason for refusing commands after an orderly stop."""
T = TypeVar("T")
_DONE: Future[None] = Future()
_DONE.set_result(None)


class CommandQueue:
    """A queue of commands: any thread posts, asks and stops; the engine thread runs them, waits and closes."""

    def __init__(self) -> None:
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._closed = ""
        """The reason for refusing commands; "" while they are accepted."""
        self.stopping = False
        self.deadline_s = math.inf
        """Requests that still run at this time are cancelled (monotonic clock)."""

    # -- from any thread ---------------------------------------------------------------------------------------------

    def post(self, command: Callable[[], object]) -> None:
        """Have the engine thread run a command. Raises EngineStopping when it has ended."""
        with self._wake:
            if self._closed:
                raise EngineStopping(self._closed)
            self._commands.append(command)
            self._wake.notify()

    def offer(self, command: Callable[[], object]) -> bool:
        """Have the engine thread run a command; False when that thread has ended."""
        try:
            self.post(command)
        except EngineStopping:
            return False
        return True

    def ask(self, command: Callable[[], T]) -> Future[T]:
        """Have the engine thread run a command; the future has what it returns or raises. Raises EngineStopping."""
        return self.ask_at_length(lambda: (command(), _DONE))

    def ask_at_length(self, command: Callable[[], tuple[T, Future[None]]]) -> Future[T]:
        """Have the engine thread run a command that starts slower work and returns (answer, the work's future).

        The returned future gets the answer when the work has ended, or the exception of either.
        """
        answer: Future[T] = Future()

        def end(value: Any, error: BaseException | None) -> None:
            if not answer.set_running_or_notify_cancel():
                # The caller cancelled the future.
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def run() -> None:
            try:
                value, begun = command()
            except Exception as error:
                end(None, error)
            else:
                begun.add_done_callback(lambda _: end(value, begun.exception()))

        self.post(run)
        return answer

    def stop(self, deadline_s: float) -> None:
        """Have the engine thread end when no request runs any more, at the latest at `deadline_s`."""
        with self._wake:
            # Set in this order, since both are read without the lock.
            self.deadline_s = deadline_s
            self.stopping = True
            self._wake.notify()

    # -- from the engine thread --------------------------------------------------------------------------------------

    @property
    def arrived(self) -> bool:
        """Whether a command waits."""
        return bool(self._commands)

    def run_pending(self) -> None:
        """Run the waiting commands, and those that they post."""
        while self._commands:
            try:
                self._commands.popleft()()
            except Exception:
                log.exception("a command failed")

    def wait(self, seconds: float | None) -> None:
        """Sleep until there is a command or the order to stop, at most `seconds`."""
        with self._wake:
            if not self._commands:
                self._wake.wait(_STOPPING_WAIT_S if self.stopping else seconds)

    def close(self, reason: str) -> None:
        """Refuse later commands with this reason."""
        with self._wake:
            self._closed = reason
