"""How exceptions are handled that foreign code raises: a handler, a listener, an interceptor."""

from __future__ import annotations

import asyncio
import threading


def ends_program(error: BaseException) -> bool:
    """Return whether an exception has to be passed on, since it ends the program: SystemExit and KeyboardInterrupt in
    the main thread. In any other thread they would end its event loop and nothing else, so they are failures there."""
    return isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def is_passed_on(error: BaseException) -> bool:
    """Return whether an exception has to be passed on, since it is no failure of the code that raised it: the current
    task is cancelled, the program ends, or the event loop is gone (GeneratorExit)."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, GeneratorExit) or ends_program(error)


def is_cancelled() -> bool:
    """Return whether the current task is cancelled itself, and not only something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
