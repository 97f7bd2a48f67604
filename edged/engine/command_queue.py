"""The queue of commands that other threads have for the engine thread, with the order to stop."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from edged.engine.request import EngineStopping

log = logging.getLogger("edged.engine")
_STOPPING_WAIT_S = 0.01
"""Seconds between two checks, while stopping, of whether all requests have ended or the deadline has passed."""
STOPPING = "the daemon is stopping"
"""The reason for refusing commands after an orderly stop."""
T = TypeVar("T")


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

        def run() -> Future[T]:
            done: Future[T] = Future()
            done.set_result(command())
            return done

        return self.ask_at_length(run)

    def ask_at_length(self, command: Callable[[], Future[T]]) -> Future[T]:
        """Have the engine thread run a command that starts slower work and returns its future.

        The returned future gets what that one gets, or the exception of the command.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                begun = command()
            except Exception as error:
                begun = Future()
                begun.set_exception(error)
            begun.add_done_callback(lambda _: pass_on(begun, answer))

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


def pass_on(done: Future[T], answer: Future[T]) -> None:
    """Give `answer` the result or exception of a future that is done, unless its caller cancelled it."""
    if not answer.set_running_or_notify_cancel():
        return
    if (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
