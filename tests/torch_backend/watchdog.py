"""Hold the device while an operator is called, and notice one that waits for it.

The thread that calls would hang behind its own Gate: another thread opens the Gate when the call
has not returned for a while, and the call counts as one that waits. No call that returns is ever
timed, so a slow machine can only be blamed after `PATIENCE`.
"""

import contextlib
import threading

from tests.torch_backend.device import gate, synchronize

PATIENCE = 1.5  # seconds


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
                call = self._calls
                over = self._changed.wait_for(
                    lambda call=call: self._gate is None or self._calls != call, PATIENCE
                )
                if not over:
                    self.waited = True
                    self._gate.open()
                    self._gate = None
