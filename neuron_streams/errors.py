"""The exceptions of neuron_streams that are not simply Python's or torch's own."""

from __future__ import annotations

from neuron_streams._runtime.lanes import CancelledError as CancelledError
from neuron_streams._runtime.manual import DeadlockError as DeadlockError

__all__ = ["AbsentError", "CancelledError", "DeadlockError", "UnsupportedError"]


class UnsupportedError(NotImplementedError):
    """Something that torch.cuda has and neuron_streams has not; the message says what to use."""


class AbsentError(UnsupportedError, AttributeError):
    """A name of torch.cuda that is not there at all; `hasattr` says so, the message what to use."""
