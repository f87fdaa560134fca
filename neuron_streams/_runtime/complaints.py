"""What the runtimes of this process say when something cannot be: one place, the same words.

A file of its own because lanes in Python and lanes in C must not be told apart by their errors.
"""

from __future__ import annotations

import threading

from neuron_streams._runtime.port import Command, Pledge, Ticket

__all__ = [
    "FORGOTTEN",
    "CancelledError",
    "NoRoom",
    "cancelled",
    "closed",
    "describe",
    "may_wait",
    "not_of_the_host",
    "timed_out",
    "worker",
]

FORGOTTEN = (1 << 63) - 1  # a closed lane has completed whatever it was given


class CancelledError(RuntimeError):
    """A command that had not completed when its runtime was closed."""


class NoRoom(RuntimeError):  # noqa: N818  (a state of the device, which its caller waits for)
    """A device has as many commands outstanding as it takes; see `Runtime.wait_for_room`."""

    def __init__(self, device: int) -> None:
        super().__init__(f"neuron:{device} takes no more commands until some have completed")


def cancelled(command: Command, ticket: Ticket, running: bool) -> CancelledError:
    """The failure of a command that the end of its runtime found pending."""
    why = "was still running" if running else "had not started"
    return CancelledError(
        f"{command.name!r} (command {ticket.value} of lane {ticket.lane}) {why} when the runtime "
        "was closed"
    )


def closed(runtime: str) -> RuntimeError:
    return RuntimeError(
        f"the {runtime} runtime of neuron_streams is closed, so it takes no more "
        "commands; streams of a closed runtime cannot be used again"
    )


class _Thread(threading.local):
    here = False


worker = _Thread()  # `here`: the calling thread runs commands


def may_wait(inside: bool = False) -> None:
    """Refuse a wait by who is waited for: a worker, or a thread `inside` the runtime's lock.

    The garbage collector runs destructors of users on any thread, between any two lines.
    """
    if inside or worker.here:
        raise RuntimeError(
            "wait: this destructor was run in the middle of the device's own work, which could not "
            "go on while it waits; synchronize before the object is dropped"
        )


def not_of_the_host(ticket: Ticket) -> ValueError:
    return ValueError(
        f"complete: lane {ticket.lane} belongs to the device, so only the device can "
        "complete its commands; open a lane with host=True for pledges"
    )


def timed_out(timeout: float | None, ticket: Ticket, completed: int, head: str) -> TimeoutError:
    return TimeoutError(
        f"wait: after {timeout} s lane {ticket.lane} has completed {completed} of the "
        f"{ticket.value} commands waited for; the next is {head}"
    )


def describe(command: Command | None, ticket: Ticket, held_by: Ticket | None) -> str:
    """The head of a lane, None if it is empty, and the ticket that it waits for, if any."""
    if command is None:
        return "none: it is done"
    where = f"{command.name!r} (command {ticket.value} of lane {ticket.lane}"
    if isinstance(command, Pledge):
        return f"{where}, which the host has not completed)"
    if held_by is None:
        return f"{where}, ready or running)"
    return f"{where}, which waits for command {held_by.value} of lane {held_by.lane})"
