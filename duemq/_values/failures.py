"""Which exceptions of application code (a handler, a listener, an interceptor) are failures of that code, and which
must be passed on."""

from __future__ import annotations

import asyncio
import threading


def ends_program(error: BaseException) -> bool:
    """Return whether an exception must be passed on because it ends the program: SystemExit or KeyboardInterrupt in the
    main thread. In another thread these would only end its event loop, so there they count as failures."""
    return isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def is_passed_on(error: BaseException) -> bool:
    """Return whether an exception must be passed on because it is not a failure of the code that raised it: the current
    task is cancelled, the program ends, or the event loop was closed (GeneratorExit)."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, GeneratorExit) or ends_program(error)


def is_cancelled() -> bool:
    """Return whether the current task itself is cancelled, rather than only something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
