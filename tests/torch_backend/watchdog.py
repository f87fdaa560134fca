"""Hold the device while an operator is called, and notice one that waits for it.

The thread that calls would hang behind its own Gate, so another one watches: when no thread of the
process has had anything to do for a while, the call waits for the device; it is counted, and the
Gate opened. Where a system does not show what its threads do, patience has to do.
"""

import contextlib
import os
import threading

from tests.torch_backend.device import gate, synchronize

LOOK, LOOKS = 0.01, 25  # seconds between looks; looks in a row that find all threads asleep
PATIENCE = 10.0  # seconds
TASKS = "/proc/self/task"


class Watchdog:
    def __init__(self):
        self._changed = threading.Condition()
        self._gate = None
        self._calls = 0
        self.waited = False
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def held(self):
        """The block runs with the current stream held; `waited` says if it had to be let go."""
        synchronize()
        gate_ = gate()
        with gate_:
            with self._changed:
                self._gate, self.waited = gate_, False
                self._calls += 1
                self._changed.notify()
            try:
                yield
            finally:
                with self._changed:
                    self._gate = None
                    self._changed.notify()

    def _watch(self):
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._gate is not None)
                if self._sleeps(self._calls):
                    self.waited = True
                    self._gate.open()
                    self._gate = None

    def _sleeps(self, call):
        """Whether the call that is watched came to rest without having returned."""
        looks = asleep = 0
        while asleep < LOOKS and looks * LOOK < PATIENCE:
            over = lambda: self._gate is None or self._calls != call  # noqa: E731
            if self._changed.wait_for(over, LOOK):
                return False
            looks += 1
            asleep = asleep + 1 if _all_asleep() else 0
        return True


def _all_asleep():
    me = str(threading.get_native_id())
    for task in os.listdir(TASKS) if os.path.isdir(TASKS) else ():
        try:
            with open(f"{TASKS}/{task}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:  # a thread that has ended
            continue
        if task != me and state not in "SIt":
            return False
    return os.path.isdir(TASKS)
