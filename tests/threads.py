"""Threads for whatever runs mlx: its compiled functions don't outlive one in peace."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def lasting(act: Callable[[], object]) -> Future:
    """What ``act`` gives in a thread of its own, which stays until the process ends.

    mlx drops what a thread has compiled when the thread is already gone: the process
    may end with it.
    """
    future = Future()

    def run():
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    return future
