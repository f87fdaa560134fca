"""What a status of libnrt means and what to do about it, and the exceptions that say so.

Source: nrt_status.h and the runtime's troubleshooting pages.
"""

from __future__ import annotations

import enum

__all__ = ["DeviceLostError", "LibraryError", "NrtError", "Status", "check", "error_of"]


class Status(enum.IntEnum):
    """NRT_STATUS, without the prefix."""

    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    INVALID_HANDLE = 3
    RESOURCE = 4
    TIMEOUT = 5
    HW_ERROR = 6
    QUEUE_FULL = 7
    LOAD_NOT_ENOUGH_NC = 9
    UNSUPPORTED_NEFF_VERSION = 10
    FAIL_HOST_MEM_ALLOC = 11
    UNINITIALIZED = 13
    CLOSED = 14
    QUEUE_EMPTY = 15
    EXEC_UNIT_UNRECOVERABLE = 101
    EXEC_BAD_INPUT = 1002
    EXEC_COMPLETED_WITH_NUM_ERR = 1003
    EXEC_COMPLETED_WITH_ERR = 1004
    EXEC_NC_BUSY = 1005
    EXEC_OOB = 1006
    COLL_PENDING = 1100
    EXEC_HW_ERR_COLLECTIVES = 1200
    EXEC_HW_ERR_HBM_UE = 1201
    EXEC_HW_ERR_NC_UE = 1202
    EXEC_HW_ERR_DMA_ABORT = 1203
    EXEC_SW_NQ_OVERFLOW = 1204
    EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NETWORK_PROXY_FAILURE = 1206


_LOG = "set NEURON_RT_LOG_LEVEL=INFO and read what the runtime logs"
_REPORT = "read dmesg and neuron-top, and restart the instance if it comes back"
_MEANINGS: dict[int, tuple[str, str]] = {
    Status.FAILURE: ("the runtime gives no reason", _LOG),
    Status.INVALID: ("an argument is invalid", _LOG),
    Status.INVALID_HANDLE: ("a handle is invalid", _LOG),
    Status.RESOURCE: (
        "a resource is exhausted, most often device memory",
        "free memory, load fewer models, or use a smaller batch",
    ),
    Status.TIMEOUT: ("the device took too long", "raise NEURON_RT_EXEC_TIMEOUT (seconds)"),
    Status.HW_ERROR: ("the hardware failed", _REPORT),
    Status.QUEUE_FULL: ("the queue of the execution unit is full", "wait for a completion"),
    Status.LOAD_NOT_ENOUGH_NC: (
        "the model needs more cores than there are",
        "widen NEURON_RT_VISIBLE_CORES, or compile for fewer cores",
    ),
    Status.UNSUPPORTED_NEFF_VERSION: (
        "the NEFF was made by a compiler that this runtime does not know, or it is no NEFF",
        "compile it again with the neuronx-cc of the installed SDK",
    ),
    Status.FAIL_HOST_MEM_ALLOC: ("the host has no memory left", "free host memory"),
    Status.UNINITIALIZED: ("the runtime is not initialized", _LOG),
    Status.CLOSED: ("the runtime is closed", "start the process again"),
    Status.QUEUE_EMPTY: ("the queue is empty", _LOG),
    Status.EXEC_UNIT_UNRECOVERABLE: (
        "the execution unit has failed for good",
        "start the process again; if that does not help, reload the driver or reboot",
    ),
    Status.EXEC_BAD_INPUT: ("the model was given invalid inputs", "compare shapes and dtypes"),
    Status.EXEC_COMPLETED_WITH_NUM_ERR: (
        "the model produced NaN or infinity",
        "look at the inputs, or compile with less aggressive casts",
    ),
    Status.EXEC_COMPLETED_WITH_ERR: ("the model ended with an error", _LOG),
    Status.EXEC_NC_BUSY: ("the core is in use", "end the other process, see neuron-ls"),
    Status.EXEC_OOB: (
        "an access out of the bounds of a tensor",
        "look at the indices among the inputs",
    ),
    Status.COLL_PENDING: ("a collective is still pending", _LOG),
    Status.EXEC_HW_ERR_COLLECTIVES: ("a collective failed", "look at the other ranks first"),
    Status.EXEC_HW_ERR_HBM_UE: ("device memory has an uncorrectable error", _REPORT),
    Status.EXEC_HW_ERR_NC_UE: ("the core has an uncorrectable error", _REPORT),
    Status.EXEC_HW_ERR_DMA_ABORT: ("a transfer was aborted", _REPORT),
    Status.EXEC_SW_NQ_OVERFLOW: ("the notification queue overflowed", _LOG),
    Status.EXEC_HW_ERR_REPAIRABLE_HBM_UE: (
        "device memory has an error that a reset repairs",
        "reset the device",
    ),
    Status.NETWORK_PROXY_FAILURE: ("the network proxy failed", "look at the other ranks first"),
}


class LibraryError(RuntimeError):
    """libnrt is not there, or is one that cannot be driven."""


class NrtError(RuntimeError):
    """A status other than success. `status` is the number, `what` the call or command."""

    def __init__(self, status: int, what: str) -> None:
        known = status in Status._value2member_map_
        name = f"NRT_{Status(status).name}" if known else "a status unknown to this version"
        meaning, remedy = _MEANINGS.get(status, ("it is not in the public headers", _LOG))
        super().__init__(f"{what}: {name} ({status}): {meaning}; {remedy}")
        self.status = status
        self.what = what


class DeviceLostError(NrtError):
    """NRT_EXEC_UNIT_UNRECOVERABLE: nothing more runs on this core in this process."""

    def __init__(self, what: str) -> None:
        super().__init__(Status.EXEC_UNIT_UNRECOVERABLE, what)


def error_of(status: int, what: str) -> NrtError:
    if status == Status.EXEC_UNIT_UNRECOVERABLE:
        return DeviceLostError(what)
    return NrtError(status, what)


def check(status: int, what: str) -> None:
    """Raise NrtError unless a status is success."""
    if status:
        raise error_of(status, what)
