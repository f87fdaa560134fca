"""The native worker of the emulated runtime: threads in C own the lanes and run what they can.

A command crosses once, as a message of 64-bit words, and its Python object is kept until it has
completed. What C can run (markers, sleeps, plain copies, compiled programs) never comes back to
Python, so the next command starts whatever Python is doing. All else, and every failure, goes to
threads of Python that block in C without the GIL; they alone make and settle failures.

The counters of a lane and the four words of a buffer are memory of Python's that C writes to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from neuron_streams._runtime.complaints import (
    FORGOTTEN,
    NoRoom,
    cancelled,
    closed,
    describe,
    may_wait,
    not_of_the_host,
    timed_out,
    worker,
)
from neuron_streams._runtime.cpu import blame, run, settle
from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import (
    Buffer,
    Command,
    Failure,
    Marker,
    Ticket,
    Unit,
)
from neuron_streams._runtime.worker.buffers import NativeBuffer
from neuron_streams._runtime.worker.library import library
from neuron_streams._runtime.worker.messages import Messages, may_need_python

__all__ = ["NativeWorkers"]

FULL, CLOSED = -1, -2
SLICE = 50_000_000  # nanoseconds: how long a wait holds off Ctrl-C
UNITS = tuple(Unit)
_Counters = ctypes.c_int64 * 2
_ticket = functools.partial(tuple.__new__, Ticket)  # at half the price of Ticket(lane, value)


class _Lane:
    """A lane as Python sees it. `kept` are the keys of commands not yet known to be completed."""

    __slots__ = ("closing", "counters", "device", "failures", "host", "id", "kept", "timed")

    def __init__(self, device: int, host: bool) -> None:
        self.id = 0
        self.device = device
        self.host = host
        self.closing = False
        self.counters = _Counters()
        self.kept: deque[tuple[int, int]] = deque()
        self.failures: list[tuple[int, Failure]] = []
        self.timed: weakref.WeakValueDictionary[int, Marker] = weakref.WeakValueDictionary()

    def sweep(self, commands: dict[int, Command]) -> bool:
        """Let go of the commands that have completed; whether any is left."""
        completed, kept = self.counters[0], self.kept
        try:
            while kept:
                item = kept.popleft()
                if item[0] > completed:
                    kept.appendleft(item)
                    return True
                commands.pop(item[1], None)
        except IndexError:  # another thread swept, too
            pass
        return False


class NativeWorkers:
    """Lanes in C. Everything of a runtime but loading, as `Lanes` is."""

    def __init__(self, name: str, devices: int) -> None:
        self.name = name
        self.in_flight = False  # whether something still ran when it was closed
        self._library = library()
        self._submit = self._library.submit
        self._runtime: int = self._library.new(devices)
        self._count = devices
        self._ledgers = [Ledger() for _ in range(devices)]
        self._lanes: dict[int, _Lane] = {}
        self._active: dict[int, _Lane] = {}  # those that keep commands
        self._abandoned: deque[int] = deque()
        self._closing: deque[int] = deque()
        self._commands: dict[int, Command] = {}
        self._keys = itertools.count(1)
        self._messages = Messages()
        self._servers: list[threading.Thread] = []
        self._lock = threading.RLock()  # a destructor inside may submit, or open a Gate
        self._host_lock = threading.RLock()
        self._given_up: dict[int, Command] = {}  # still running when the end came
        self._closed = False

    def device_count(self) -> int:
        return self._count

    # -- lanes ------------------------------------------------------------------------------

    def open_lane(self, device: int, priority: int = 0, *, host: bool = False) -> int:
        self._bury()
        lane = _Lane(device, host)
        counters = ctypes.addressof(lane.counters)
        lane.id = self._library.open_lane(self._runtime, device, priority, host, counters)
        if lane.id == CLOSED:
            raise closed(self.name)
        self._lanes[lane.id] = lane
        return lane.id

    def close_lane(self, lane: int) -> None:
        # Called by destructors, which may run anywhere: only note it down.
        self._abandoned.append(lane)

    def _bury(self) -> None:
        with contextlib.suppress(IndexError):
            while self._abandoned:
                lane = self._abandoned.popleft()
                self._library.close_lane(self._runtime, lane)
                if lane in self._lanes:
                    self._lanes[lane].closing = True
                    self._closing.append(lane)
            for _ in range(min(len(self._closing), 8)):
                lane = self._closing.popleft()
                if not self._forget_if_done(lane):
                    self._closing.append(lane)

    def _forget_if_done(self, lane: int) -> bool:
        found = self._lanes.get(lane)
        if found is None:
            return True
        # One with failures is kept until somebody has asked for them: none is swallowed.
        if found.counters[0] < found.counters[1] or found.failures:
            return False
        self._forget(found)
        return True

    def _forget(self, lane: _Lane) -> None:
        lane.sweep(self._commands)
        self._active.pop(lane.id, None)
        self._lanes.pop(lane.id, None)

    def lanes(self, device: int) -> Sequence[int]:
        lanes = list(self._lanes.values())
        return [lane.id for lane in lanes if lane.device == device and not lane.host]

    def submitted(self, lane: int) -> int:
        found = self._lanes.get(lane)
        return 0 if found is None else found.counters[1]

    def completed(self, lane: int) -> int:
        found = self._lanes.get(lane)
        return FORGOTTEN if found is None else found.counters[0]

    def completed_at(self, ticket: Ticket) -> float | None:
        lane = self._lanes.get(ticket.lane)
        marker = None if lane is None else lane.timed.get(ticket.value)
        return None if marker is None else marker.at

    def failures(self, ticket: Ticket, since: int = 0) -> tuple[Failure, ...]:
        lane = self._lanes.get(ticket.lane)
        if lane is None or not lane.failures:
            return ()
        found = [f for value, f in list(lane.failures) if since < value <= ticket.value]
        if lane.closing and ticket.value >= lane.counters[1] == lane.counters[0]:
            self._forget(lane)
        return tuple({id(f): f for f in found}.values())

    def busy_intervals(self) -> Sequence[tuple[int, Unit, float, float, str]]:
        names = list(self._messages.names)
        return [
            (item.device, UNITS[item.unit], item.began, item.ended, names[item.name])
            for item in self._library.intervals(self._runtime)
        ]

    # -- submitting -------------------------------------------------------------------------

    def submit(
        self, lane: int, command: Command, after: Sequence[Ticket] = (), wait: bool = True
    ) -> Ticket:
        if self._abandoned:
            self._bury()
        found = self._lanes[lane]
        key = next(self._keys)
        message = self._messages.write(command, key, after)
        if not self._servers and may_need_python(command):
            self._serve_one_more()
        self._commands[key] = command
        value = self._submit(self._runtime, lane, message, len(message) >> 3)
        if value < 0:
            value = self._submit_again(value, lane, key, message, wait)
        if type(command) is Marker and command.timed:
            found.timed[value] = command
        kept = found.kept
        kept.append((value, key))
        self._active[lane] = found
        try:
            if kept[0][0] <= found.counters[0]:
                found.sweep(self._commands)
        except IndexError:
            pass  # another thread has swept
        return _ticket((lane, value))

    def _submit_again(self, value: int, lane: int, key: int, message: bytes, wait: bool) -> int:
        try:
            while value == FULL and wait:
                self.wait_for_room(lane)
                value = self._submit(self._runtime, lane, message, len(message) >> 3)
        finally:
            if value < 0:
                del self._commands[key]
        if value == CLOSED:
            raise closed(self.name)
        if value == FULL:
            raise NoRoom(self._lanes[lane].device)
        if value < 0:
            raise KeyError(lane)
        return value

    def wait_for_room(self, lane: int) -> None:
        may_wait()
        self._library.wait_for_room(self._runtime, lane, SLICE)

    def complete(self, ticket: Ticket, error: BaseException | None = None) -> None:
        lane = self._lanes.get(ticket.lane)
        if lane is None or lane.counters[0] >= ticket.value:
            return
        if not lane.host:
            raise not_of_the_host(ticket)
        with self._host_lock:
            if error is not None:
                for value in range(lane.counters[0] + 1, min(ticket.value, lane.counters[1]) + 1):
                    name = self._name_of(lane, value)
                    failure = Failure(error, Ticket(lane.id, value), name)
                    lane.failures.append((value, failure))
            self._library.complete(self._runtime, ticket.lane, ticket.value)

    # -- what only Python can run -----------------------------------------------------------

    def _serve_one_more(self) -> None:
        with self._lock:
            if self._closed or len(self._servers) > self._count * 6:
                return
            name = f"neuron_streams server {len(self._servers)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._servers.append(thread)
        thread.start()

    def _serve(self) -> None:
        told = (ctypes.c_int64 * 6)()
        entry = None
        worker.here = True
        with torch.inference_mode():
            while entry := self._library.next(self._runtime, entry, told):
                key, lane, value, idle, failed, message = told
                if not idle:  # one waits always, for a command that another unit may run beside
                    self._serve_one_more()
                self._answer(key, Ticket(lane, value), failed, message)

    def _answer(self, key: int, ticket: Ticket, failed: int, message: int) -> None:
        command = self._commands[key]
        error: BaseException | None = None
        failure = None if failed else blame(command)
        if failed:
            text = ctypes.string_at(message).decode(errors="replace").strip() if message else ""
            text = text or "it failed and does not say why; there may be no memory left"
            error = RuntimeError(f"{command.name}: {text}")
        elif failure is None:
            try:
                run(command)
            except BaseException as caught:  # kept for whoever reads the outputs
                error = caught
        if error is not None:
            failure = Failure(error, ticket, command.name, error.__traceback__)
        if key not in self._given_up:
            self._settle(command, ticket, failure)

    def _settle(self, command: Command, ticket: Ticket, failure: Failure | None) -> None:
        settle(command, failure)
        if failure is not None:
            self._lanes[ticket.lane].failures.append((ticket.value, failure))

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        lane, value = ticket
        found = self._lanes.get(lane)
        if found is None:
            return
        end = None if timeout is None else time.monotonic() + timeout
        wait = self._library.wait
        while found.counters[0] < value:
            may_wait()
            left = _left(end)
            if left <= 0:
                raise timed_out(timeout, ticket, found.counters[0], self._head(lane))
            wait(self._runtime, lane, value, left)
        self._sweep()

    def _sweep(self) -> None:
        for lane in list(self._active.values()):
            if not lane.sweep(self._commands):
                self._active.pop(lane.id, None)
                if lane.kept:  # somebody has submitted in between
                    self._active[lane.id] = lane

    def _head(self, lane: int) -> str:
        key, value, upstream, awaited = self._library.head(self._runtime, lane)
        command = self._commands.get(key)
        held_by = Ticket(upstream, awaited) if upstream else None
        return describe(command, Ticket(lane, value), held_by)

    def _name_of(self, lane: _Lane, value: int) -> str:
        key = next((key for kept, key in list(lane.kept) if kept == value), 0)
        command = self._commands.get(key)
        return "pledge" if command is None else command.name

    # -- memory and the end -----------------------------------------------------------------

    def allocate(self, device: int, nbytes: int) -> Buffer:
        return NativeBuffer(device, nbytes, self._ledgers[device], self._library)

    def ledger(self, device: int) -> Ledger:
        return self._ledgers[device]

    def close(self, timeout: float | None = None) -> None:
        """Run what can run until `timeout` seconds (None: to the end), then cancel the rest."""
        if self._closed:
            return
        end = None if timeout is None else time.monotonic() + timeout
        while not self._closed and (left := _left(end)) > 0:
            if self._library.drain(self._runtime, left):
                break
        for command, ticket, running in self._cancel():
            failure = Failure(cancelled(command, ticket, running), ticket, command.name)
            self._settle(command, ticket, failure)
        self._library.stop(self._runtime)
        self._leave()

    def _cancel(self) -> Iterator[tuple[Command, Ticket, bool]]:
        self._closed = True
        told = (ctypes.c_int64 * (4 * 256))()
        while count := self._library.cancel(self._runtime, told, 256):
            for i in range(count):
                key, lane, value, running = told[4 * i : 4 * i + 4]
                if running:
                    self._given_up[key] = self._commands[key]
                yield self._commands[key], Ticket(lane, value), bool(running)

    def _leave(self) -> None:
        in_flight = self._library.join(self._runtime, 2 * SLICE) > 0
        for thread in self._servers:
            if thread is not threading.current_thread():
                thread.join(0.05)
                in_flight |= thread.is_alive()
        self.in_flight = in_flight
        if not in_flight:
            for lane in list(self._lanes.values()):
                lane.sweep(self._commands)

    def __del__(self) -> None:
        # Only what was closed and has no threads left: all else lives on in emulated.py.
        if getattr(self, "_closed", False) and not self.in_flight:
            self._library.free(self._runtime)


def _left(end: float | None) -> int:
    """Nanoseconds of one slice of a wait that ends at a moment; None is never."""
    return SLICE if end is None else min(SLICE, int((end - time.monotonic()) * 1e9))
