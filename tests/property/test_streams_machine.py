"""Streams and events against a model of vector clocks, with any interleaving of the device.

A clock says how far each lane must have got: that of a command is the join of its predecessor on
the lane and of all that the lane waits for. The device may run a command only when everything in
its clock has completed, and must run it once no closed gate is in its clock: this catches a wait
that is lost and a wait that is too much. On the manual runtime hypothesis chooses which lane steps.

Operators on device tensors are commands like others, but leave no trace of their own: what shows
when they ran is the memory. Programs have no races: an operator is ordered behind all that used
what it writes, so a tensor's memory is that of its newest write that no closed gate holds, and NaN
where there is none.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import neuron_streams
from neuron_streams._context import context, core
from neuron_streams._runtime.port import Buffer, Ticket
from neuron_streams.testing import DeadlockError, EmulatedRuntime, Gate, ManualRuntime, use_runtime
from tests.runtime.commands import view_of

Clock = dict[int, int]
picks = st.integers(0, 5)


def join(*clocks: Clock) -> Clock:
    made: Clock = {}
    for clock in clocks:
        for lane, value in clock.items():
            made[lane] = max(made.get(lane, 0), value)
    return made


@dataclass
class Lane:
    """A stream and what the model knows of it; `commands` counts from 1."""

    number: int
    stream: neuron_streams.Stream
    device: int
    clock: Clock = field(default_factory=dict)
    commands: list[Work] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    raised: int = 0  # failures up to this command were raised by the stream
    seen: int = 0  # ... by anything
    raised_by_device: int = 0

    def news(self, since: int) -> bool:
        return any(not work.runs_well for work in self.commands[since:])


@dataclass
class Work:
    lane: Lane
    index: int
    clock: Clock
    output: Buffer | None
    fails: bool
    poisoned: bool
    traceless: bool = False

    @property
    def runs_well(self) -> bool:
        return not (self.fails or self.poisoned)


@dataclass
class Point:
    """An event; what it covers is that of its newest record."""

    event: neuron_streams.Event
    lane: Lane | None = None
    clock: Clock = field(default_factory=dict)
    upto: int = 0
    since: int = 0


@dataclass
class Value:
    """A device tensor of two floats and what was written to it, in order; None is poison.

    Each write is ordered behind the one before, so those that may have run come first.
    """

    tensor: torch.Tensor
    device: int
    writes: list[tuple[Work, list[float] | None]]
    uses: list[Clock] = field(default_factory=list)

    @property
    def now(self) -> list[float] | None:
        return self.writes[-1][1]

    @property
    def clock(self) -> Clock:
        return self.writes[-1][0].clock


class Runs:
    """The handle of a command: notes that it ran."""

    name = "model"

    def __init__(
        self, log: list[tuple[int, int]], where: tuple[int, int], fails: bool, number: float = 0
    ) -> None:
        self.log, self.where, self.fails, self.number = log, where, fails, number

    def run(self, inputs):
        self.log.append(self.where)
        if self.fails:
            raise ArithmeticError(f"command {self.where}")
        return [torch.full((2,), float(self.number))]


class StreamsMachine(RuleBasedStateMachine):
    """Rules for any runtime; `device_runs` says who steps."""

    lanes, works, points, gates = (Bundle(x) for x in ("lanes", "works", "points", "gates"))
    values = Bundle("values")

    implicit = True

    def runtime_for(self, seed: int):
        raise NotImplementedError

    @initialize(seed=st.integers(0, 1 << 16), target=lanes)
    def begin(self, seed):
        self.random = random.Random(seed)
        self.scope = use_runtime(self.runtime_for(seed))
        self.runtime = self.scope.__enter__()
        port = context().port
        port.implicit_waits, port.fills_unfinished = self.implicit, True
        self.all: list[Lane] = []
        self.tensors: list[Value] = []
        self.log: list[tuple[int, int]] = []
        self.checked = 0
        self.ran: set[tuple[int, int]] = set()
        self.closed: dict[int, Gate] = {}  # model lane of a gate: the gate
        self.next_gate = -1
        self.contexts = []
        return multiple(*(self.add(neuron_streams.default_stream(i), i) for i in range(2)))

    def add(self, stream, device) -> Lane:
        lane = Lane(len(self.all), stream, device)
        self.all.append(lane)
        return lane

    @rule(device=st.integers(0, 1), priority=st.integers(-4, 1), target=lanes)
    def stream(self, device, priority):
        return self.add(neuron_streams.Stream(device, priority), device)

    @rule(target=points, timed=st.booleans())
    def event(self, timed):
        return Point(neuron_streams.Event(enable_timing=timed))

    @rule(lane=lanes, fails=st.integers(0, 5), reads=st.lists(works, max_size=2), target=works)
    def submit(self, lane, fails, reads):
        return self.work(lane, fails == 0, reads)

    @rule(fails=st.integers(0, 9), target=works)
    def submit_to_the_current_stream(self, fails):
        stream = neuron_streams.current_stream()
        lane = next(x for x in self.all if x.stream == stream)
        return self.work(lane, fails == 0, [])

    def work(self, lane, fails, reads) -> Work:
        if not self.implicit:  # then it is an error to read what nobody ordered before
            ahead = [(r, lane.clock.get(r.lane.number, 0)) for r in reads]
            reads = [r for r, upto in ahead if upto >= r.index]
        index = len(lane.commands) + 1
        output = context().port.allocate(lane.device, 8)
        inputs = [view_of(r.output) for r in reads]
        lane.clock = join(lane.clock, *(r.clock for r in reads), {lane.number: index})
        poisoned = any(not r.runs_well for r in reads)
        made = Work(lane, index, lane.clock, output, fails, poisoned)
        lane.commands.append(made)
        handle = Runs(self.log, (lane.number, index), fails)
        command = core().Execute(handle, inputs, [view_of(output)])
        lane.tickets.append(lane.stream._submit(command))
        return made

    @rule(lane=lanes, number=st.integers(-9, 9), fails=st.integers(0, 9), target=values)
    def make(self, lane, number, fails):
        """An executable makes a tensor, or fails."""
        index = len(lane.commands) + 1
        lane.clock = join(lane.clock, {lane.number: index})
        handle = Runs(self.log, (lane.number, index), fails == 0, number)
        with neuron_streams.stream(lane.stream):
            loaded = core().Loaded("make", [], [(torch.float32, (2,), (1,))], [], 0, handle)
            (tensor,) = loaded.call([])
        made = Work(lane, index, lane.clock, core().buffer_of(tensor), fails == 0, False)
        value = Value(tensor, lane.device, [(made, None if fails == 0 else [float(number)] * 2)])
        return self.noted(lane, made, value)

    def noted(self, lane: Lane, work: Work, value: Value) -> Value:
        lane.commands.append(work)
        lane.tickets.append(lane.stream._state.ticket())
        self.tensors.append(value)
        return value

    def order(self, lane: Lane, *clocks: Clock) -> None:
        """Have a lane wait for what a race-free program must wait for, where it does not yet."""
        for clock in clocks:
            for other in self.all:
                if lane.clock.get(other.number, 0) < clock.get(other.number, 0):
                    lane.stream.wait_stream(other.stream)
                    lane.clock = join(lane.clock, other.clock)

    def operate(self, lane: Lane, reads: list[Value], written: Value | None) -> Work:
        """Order an operator and note it; `written` it overwrites or updates."""
        before = [value.clock for value in (*reads, *([written] if written else []))]
        if not self.implicit:
            self.order(lane, *before)
        if written is not None:
            self.order(lane, *written.uses)
        index = len(lane.commands) + 1
        lane.clock = join(lane.clock, *before, {lane.number: index})
        poisoned = any(r.now is None for r in reads)
        for read in reads:
            read.uses.append(lane.clock)
        return Work(lane, index, lane.clock, None, False, poisoned, traceless=True)

    def beside(self, pick: int, value: Value, *others: Value) -> tuple[Lane | Value, ...]:
        """A stream of a tensor's device, and tensors of that device in the place of others."""
        here = [lane for lane in self.all if lane.device == value.device]
        return here[pick % len(here)], *(x if x.device == value.device else value for x in others)

    @rule(pick=picks, a=values, b=values, target=values)
    def sum_of(self, pick, a, b):
        lane, b = self.beside(pick, a, b)
        work = self.operate(lane, [a, b], None)
        with neuron_streams.stream(lane.stream):
            tensor = a.tensor + b.tensor
        work.output = core().buffer_of(tensor)
        now = None if work.poisoned else [x + y for x, y in zip(a.now, b.now, strict=True)]
        return self.noted(lane, work, Value(tensor, lane.device, [(work, now)]))

    @rule(pick=picks, a=values, b=values, factor=st.sampled_from([2.0, -1.0]))
    def update_in_place(self, pick, a, b, factor):
        """Half of one with the other: `a[1:].add_(b[:1])`, then all of it times a factor."""
        lane, b = self.beside(pick, a, b)
        for part in ("add", "multiply"):
            reads = [a, b] if part == "add" else [a]
            work = self.operate(lane, reads, a)
            with neuron_streams.stream(lane.stream):
                if part == "add":
                    a.tensor[1:].add_(b.tensor[:1])
                    now = None if work.poisoned else [a.now[0], a.now[1] + b.now[0]]
                else:
                    a.tensor.mul_(factor)
                    now = None if work.poisoned else [x * factor for x in a.now]
            self.wrote(lane, work, a, now)

    def wrote(self, lane: Lane, work: Work, value: Value, now: list[float] | None) -> None:
        lane.commands.append(work)
        lane.tickets.append(lane.stream._state.ticket())
        value.writes.append((work, now))
        value.uses.clear()

    @rule(pick=picks, a=values, b=values, target_=values)
    def add_out(self, pick, a, b, target_):
        lane, a, b = self.beside(pick, target_, a, b)
        assume(target_ is not a and target_ is not b)
        work = self.operate(lane, [a, b], target_)
        with neuron_streams.stream(lane.stream):
            torch.add(a.tensor, b.tensor, out=target_.tensor)
        now = None if work.poisoned else [x + y for x, y in zip(a.now, b.now, strict=True)]
        self.wrote(lane, work, target_, now)

    @rule(pick=picks, a=values, target_=values)
    def copy(self, pick, a, target_):
        """Within a device; between two the current streams of both take part."""
        assume(target_ is not a)
        (lane,) = self.beside(pick, target_)
        giver = None
        if a.device != lane.device:
            current = neuron_streams.current_stream(a.device)
            giver = next(x for x in self.all if x.stream == current)
            lane.clock = join(lane.clock, giver.clock)
        work = self.operate(lane, [a], target_)
        with neuron_streams.stream(lane.stream):
            target_.tensor.copy_(a.tensor)
        if giver is not None:
            giver.clock = join(giver.clock, lane.clock)
        self.wrote(lane, work, target_, None if work.poisoned else a.now)

    @rule(pick=picks, target_=values, number=st.integers(-9, 9))
    def fill_from_host(self, pick, target_, number):
        (lane,) = self.beside(pick, target_)
        work = self.operate(lane, [], target_)
        source = torch.full((2,), float(number))
        with neuron_streams.stream(lane.stream):
            target_.tensor.copy_(source)
        source.zero_()  # it was read at the call
        self.wrote(lane, work, target_, [float(number)] * 2)

    @rule(pick=picks, other=picks, a=values, number=st.integers(-9, 9), target=gates)
    def reuse(self, pick, other, a, number):
        """A held stream reads what another one then overwrites: the writer is to wait for it."""
        (lane,) = self.beside(pick, a)
        gate = self.hold(lane)
        self.sum_of(pick, a, a)
        self.fill_from_host(other, a, number)
        return gate

    @rule(value=values)
    def read(self, value):
        """Reading waits for the tensor's own writer, and raises what poisoned it."""
        work, now = value.writes[-1]
        if not self.is_free(work.clock):
            return
        if now is None:
            with pytest.raises(ArithmeticError, match="^command"):
                value.tensor.tolist()
        else:
            assert value.tensor.tolist() == now
        self.look()
        assert self.done(work.clock)

    @rule(lane=lanes, target=gates)
    def hold(self, lane):
        number, self.next_gate = self.next_gate, self.next_gate - 1
        self.closed[number] = Gate(lane.stream)
        lane.clock = join(lane.clock, {number: 1})
        return number

    @rule(number=gates)
    def open(self, number):
        gate = self.closed.pop(number, None)
        if gate is not None:
            assert not gate.is_open
            gate.open()

    @rule(point=points, lane=lanes)
    def record(self, point, lane):
        if point.lane is not None and point.lane.device != lane.device:
            with pytest.raises(RuntimeError, match="^Event device"):
                point.event.record(lane.stream)
            return
        point.event.record(lane.stream)
        point.lane, point.clock = lane, dict(lane.clock)
        point.upto, point.since = len(lane.commands), lane.seen

    @rule(point=points, lane=lanes)
    def wait(self, point, lane):
        lane.stream.wait_event(point.event)
        lane.clock = join(lane.clock, point.clock)

    @rule(lane=lanes, other=lanes)
    def wait_stream(self, lane, other):
        lane.stream.wait_stream(other.stream)
        lane.clock = join(lane.clock, other.clock)

    @rule(lane=lanes)
    def enter(self, lane):
        before = neuron_streams.current_stream()
        context = neuron_streams.stream(lane.stream)
        context.__enter__()
        self.contexts.append((context, before))
        assert neuron_streams.current_stream() == lane.stream
        assert neuron_streams.current_device() == lane.device

    @precondition(lambda self: self.contexts)
    @rule()
    def leave(self):
        context, before = self.contexts.pop()
        context.__exit__(None, None, None)
        assert neuron_streams.current_stream() == before

    def is_free(self, clock: Clock) -> bool:
        return not any(number in clock for number in self.closed)

    def done(self, clock: Clock) -> bool:
        """Whether everything in a clock is known to have completed, gates included."""
        reached = all(
            work.poisoned or work.traceless or (lane.number, work.index) in self.ran
            for lane in self.all
            for work in lane.commands[: clock.get(lane.number, 0)]
        )
        return reached and self.is_free(clock)

    @rule(lane=lanes)
    def synchronize_stream(self, lane):
        news = lane.news(lane.raised)
        if self.waited(lane.stream.synchronize, lane.clock, news):
            lane.raised = lane.seen = len(lane.commands)

    @rule(point=points)
    def synchronize_event(self, point):
        lane = point.lane
        news = lane is not None and any(
            not work.runs_well for work in lane.commands[point.since : point.upto]
        )
        if self.waited(point.event.synchronize, point.clock, news) and lane is not None:
            lane.seen = max(lane.seen, point.upto)
            point.since = max(point.since, point.upto)

    @rule(device=st.integers(0, 1))
    def synchronize_device(self, device):
        mine = [lane for lane in self.all if lane.device == device]
        news = any(lane.news(lane.raised_by_device) for lane in mine)
        clock = join(*(lane.clock for lane in mine))
        if self.waited(lambda: neuron_streams.synchronize(device), clock, news):
            for lane in mine:
                lane.raised_by_device = lane.seen = len(lane.commands)

    def waited(self, call, clock: Clock, news: bool) -> bool:
        """Wait, if it can end; a failure that is news is raised, and everything before is done."""
        if not self.is_free(clock):
            if isinstance(self.runtime, ManualRuntime):
                with pytest.raises(DeadlockError):
                    call()
            return False
        if news:
            with pytest.raises(ArithmeticError, match="^command"):
                call()
        else:
            call()
        self.look()
        assert self.done(clock), "a host wait implies everything before"
        return True

    @rule(point=points)
    def query_event(self, point):
        self.queried(point.event.query, point.clock)

    @rule(lane=lanes)
    def query_stream(self, lane):
        self.queried(lane.stream.query, lane.clock)

    def queried(self, query, clock: Clock) -> None:
        answer = query()
        self.look()
        if answer:
            assert self.done(clock)
        elif isinstance(self.runtime, ManualRuntime) and not self.skips(clock):
            assert not self.done(clock)

    def skips(self, clock: Clock) -> bool:
        """Whether a clock has commands that leave no trace of their completion."""
        return any(
            work.poisoned or work.traceless
            for lane in self.all
            for work in lane.commands[: clock.get(lane.number, 0)]
        )

    @invariant()
    def look(self):
        """Whatever has run since ran once, and behind everything in its clock."""
        while self.checked < len(getattr(self, "log", ())):
            number, index = where = self.log[self.checked]
            work = self.all[number].commands[index - 1]
            assert where not in self.ran, "ran twice"
            assert not work.poisoned, "ran though its input was poisoned"
            assert self.done({**work.clock, number: index - 1}), "ran too early"
            self.ran.add(where)
            self.checked += 1

    @rule()
    def settle(self):
        """Everything runs that no closed gate holds, and nothing that one does."""
        self.device_runs()
        for lane in self.all:
            for work in lane.commands:
                free = self.is_free(work.clock)
                if work.traceless:
                    continue
                if free and not work.poisoned:
                    assert (lane.number, work.index) in self.ran
                elif not free:
                    assert (lane.number, work.index) not in self.ran

        for value in self.tensors:
            self.check_memory(value)

    def check_memory(self, value: Value) -> None:
        """What is in a tensor's memory, everything having run that may."""
        past = [now for work, now in value.writes if self.is_free(work.clock)]
        memory = core().View(value.tensor).on_host().tolist()
        if not past:
            assert all(map(math.isnan, memory)), "written too early"
        elif past[-1] is not None:
            assert memory == past[-1]
        if len(past) == len(value.writes):
            poisoned = core().buffer_of(value.tensor).failure is not None
            assert poisoned == (past[-1] is None)

    def device_runs(self) -> None:
        raise NotImplementedError

    def teardown(self):
        if not hasattr(self, "scope"):
            return
        while self.contexts:
            self.leave()
        if self.random.random() < 0.5:
            for gate in self.closed.values():
                gate.open()
            self.closed.clear()
        try:
            self.settle()
        finally:  # a runtime that is closed later takes the device from the next one
            self.scope.__exit__(None, None, None)
        self.look()
        for lane in self.all:
            for work in lane.commands:
                ran = (lane.number, work.index) in self.ran
                assert not (ran and work.poisoned)
                settled = ran or work.traceless or work.output.failure is not None
                assert settled, "completed or failed"
        neuron_streams.set_stream(None)


class ManualMachine(StreamsMachine):
    def runtime_for(self, seed):
        return ManualRuntime(2, order=seed)

    @rule(data=st.data())
    def step(self, data):
        ready = self.runtime.ready()
        if ready:
            assert self.runtime.step(data.draw(st.sampled_from(ready)))

    def device_runs(self):
        self.runtime.run()
        self.look()
        assert self.runtime.ready() == []


class NativeMachine(StreamsMachine):
    def runtime_for(self, seed):
        return EmulatedRuntime(2)

    def device_runs(self):
        for lane in self.all:
            for work in lane.commands:
                if self.is_free(work.clock):
                    self.runtime.wait(lane.tickets[work.index - 1], timeout=30)
        self.look()


class ExplicitMachine(ManualMachine):
    implicit = False


TestExplicit = ExplicitMachine.TestCase
TestExplicit.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestManual = ManualMachine.TestCase
TestManual.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNative = NativeMachine.TestCase
TestNative.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
