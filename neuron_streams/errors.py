"""The exceptions of neuron_streams that are not simply Python's or torch's own."""

from __future__ import annotations

import torch

from neuron_streams._runtime.manual import DeadlockError as DeadlockError
from neuron_streams._runtime.port import CancelledError as CancelledError
from neuron_streams._runtime.process import FORKED as FORKED

__all__ = [
    "AbsentError",
    "AbsentImportError",
    "AcceleratorError",
    "CancelledError",
    "CudaError",
    "DeferredCudaCallError",
    "DeadlockError",
    "ForeignError",
    "OutOfMemoryError",
    "UnsupportedError",
    "check_error",
]

# torch's own classes, so that `except` clauses of CUDA code mean what they say.
OutOfMemoryError: type[RuntimeError] = torch.OutOfMemoryError
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)


class CudaError(RuntimeError):
    """A status other than 0 that was given to `check_error`. Source: torch.cuda.CudaError."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}: no call of neuron_streams returns one, see its source")


def check_error(res: int) -> None:
    """Raise CudaError unless the status is 0. Source: torch.cuda.check_error."""
    if res != 0:
        raise CudaError(res)


class DeferredCudaCallError(Exception):
    """Raised by nothing: a call that waits for the first use raises what it raises.

    Source: torch.cuda.DeferredCudaCallError.
    """


class UnsupportedError(NotImplementedError):
    """Something that torch.cuda has and neuron_streams has not; the message says what to use."""


class AbsentError(UnsupportedError, AttributeError):
    """A name of torch.cuda that is not there at all; `hasattr` says so, the message what to use."""


class AbsentImportError(UnsupportedError, ImportError):
    """The same of `from neuron_streams import name`, which knows no other error than ImportError.

    A class of its own because Python has no room for AttributeError and ImportError in one.
    """


class ForeignError(TypeError, AttributeError):
    """A stream or event of somebody else's, or no stream or event at all.

    An AttributeError, too, since torch.cuda asks whatever it is given for its attributes.
    """
