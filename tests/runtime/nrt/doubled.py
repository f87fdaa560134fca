"""The test double of libnrt, built by the system's compiler, and a runtime on it.

`DoubleRuntime` also runs handles of Python, which the contract tests are written with: each becomes
a model of the double that calls back. What the double holds against its user fails `close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import random
import tempfile
import traceback
import weakref
from pathlib import Path

import pytest
import torch

import neuron_streams
from neuron_streams._compiler import archive
from neuron_streams._runtime import cache, toolchain
from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.model import Model, Neff
from neuron_streams._runtime.nrt.queue import Request
from neuron_streams._runtime.nrt.requests import Requests, Route, block_of
from neuron_streams._runtime.nrt.runtime import NrtRuntime
from neuron_streams._runtime.nrt.status import Status
from neuron_streams._runtime.port import Kind, Payload
from neuron_streams._runtime.program import load_on_cpu
from neuron_streams.executables import Executable

ABIS = ("2.28", "2.29", "2.30")
FOLDER = Path(__file__).parent
EXECUTION_FAILED = 1004
MOST = 32  # tensors of a model of the double
HOST = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)
KEEP = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t)


class Record(ctypes.Structure):
    """double_record_t."""

    _fields_ = [
        ("lnc", ctypes.c_int64),
        ("xu", ctypes.c_int64),
        ("queue", ctypes.c_int64),
        ("number", ctypes.c_uint64),
        ("scheduled", ctypes.c_double),
        ("began", ctypes.c_double),
        ("ended", ctypes.c_double),
    ]


def build(abi, *flags):
    """The path of the double of an ABI, compiled at its first use."""
    compiler = toolchain.c_compiler()
    if compiler is None:
        pytest.skip("the double of libnrt needs a C compiler, and there is none")
    sources = [FOLDER / "double.c", FOLDER / "double.h"]
    flags = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags)
    flags += (f"-DNRT_ABI={abi.replace('.', '')}", "-fPIC", "-shared")
    text = b"".join(path.read_bytes() for path in sources) + " ".join(flags).encode()
    key = hashlib.sha256(text + toolchain.machine().encode()).hexdigest()
    command = [*compiler, *flags, str(sources[0]), "-o"]
    path = cache.keep(
        "nrt-double", key, "libnrt.so", lambda to: toolchain.run([*command, str(to)], to)
    )
    return str(path)


class Double:
    """The knobs of a double, and what it has seen."""

    def __init__(self, abi="2.30"):
        self.abi = abi
        self.path = build(abi)
        self._library = library = ctypes.CDLL(self.path)
        library.double_count.restype = ctypes.c_int64
        library.double_violations.restype = library.double_history.restype = ctypes.c_size_t
        library.double_set_memory.argtypes = (ctypes.c_size_t,)
        library.double_set_latency.argtypes = library.double_set_version.argtypes = (
            ctypes.c_uint64,
            ctypes.c_uint64,
        )
        self.address_of = library.nrt_tensor_get_va
        self.address_of.restype, self.address_of.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        library.double_layout.restype = ctypes.c_bool
        library.double_layout.argtypes = (
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.POINTER(ctypes.c_size_t),
        )
        if abi == "2.28":
            self.read, self.write, self.copy, self.compute = range(4)
        else:
            self.read = self.write = self.copy = 0
            self.compute = 1
        self.reset()

    def __getattr__(self, name):
        return getattr(self._library, f"double_{name}")

    def reset(self):
        self._library.double_reset()
        self._library.double_set_host(_run_hosted, _keep_archive)

    def count(self, what):
        return self._library.double_count(what.encode())

    def violations(self):
        text = ctypes.create_string_buffer(1 << 14)
        self._library.double_violations(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def history(self, room=1 << 14):
        records = (Record * room)()
        return list(records[: self._library.double_history(records, ctypes.c_size_t(room))])

    def layout(self):
        name, value = ctypes.c_char_p(), ctypes.c_size_t()
        found = {}
        while self._library.double_layout(len(found), ctypes.byref(name), ctypes.byref(value)):
            found[name.value.decode()] = value.value
        return found

    @contextlib.contextmanager
    def held(self, unit, device=0, queue=0):
        """Nothing starts on a queue inside."""
        self.hold(device, unit, queue)
        try:
            yield
        finally:
            self.release(device, unit, queue, -1)


def neff(kernel, inputs, outputs, time=0):
    """The bytes of a model for the double: float32 tensors by name and number of elements."""
    lines = ["double-neff", f"kernel {kernel}", f"time {int(time * 1e9)}"]
    lines += [f"input {name} 10 4 {n}" for name, n in inputs.items()]
    lines += [f"output {name} 10 4 {n}" for name, n in outputs.items()]
    return "\n".join(lines).encode() + b"\n"


def payload(kernel, inputs, outputs, time=0, /, **kwargs):
    lines = [
        f"alias {position} {list(outputs).index(name)}\n"
        for position, name in kwargs.get("aliases", {}).items()
        if name in outputs and position < len(inputs)
    ]
    content = Neff(neff(kernel, inputs, outputs, time) + "".join(lines).encode(), **kwargs)
    return Payload("neff", kernel, content)


def neff_of(executable, names=None):
    """The bytes of a model for the double that carries a compiled executable, as a NEFF does.

    What it updates in place are aliased pairs: `x` and `x_out`, unless there are names for all
    outputs, aliased ones last.
    """
    with tempfile.NamedTemporaryFile(suffix=".neff") as file:
        executable.save(file.name)
        carried = Path(file.name).read_bytes()
    lines = ["double-neff", "kernel archive"]
    aliased = [spec for spec in executable.inputs if spec.name in executable.mutates]
    names = names or [s.name for s in executable.outputs] + [f"{s.name}_out" for s in aliased]
    lines += [_line("input", spec.name, spec) for spec in executable.inputs]
    outputs = [*executable.outputs, *aliased]
    lines += [_line("output", name, spec) for name, spec in zip(names, outputs, strict=False)]
    for number, spec in enumerate(aliased, len(executable.outputs)):
        lines.append(f"alias {executable.inputs.index(spec)} {number}")
    return "\n".join(lines).encode() + b"\n\n" + carried


def _line(usage, name, spec):
    return f"{usage} {name} 10 {spec.dtype.itemsize} {','.join(map(str, spec.shape))}"


def on_double(executable):
    """An executable as a NEFF of the double."""
    names = [spec.name for spec in executable.inputs]
    neff = Neff(
        neff_of(executable),
        names,
        [spec.name for spec in executable.outputs],
        {names.index(name): f"{name}_out" for name in executable.mutates},
    )
    return Executable(executable._signature, Payload("neff", executable.name, neff))


def compile_for_double(function, example_inputs, target="cpu", **how):
    """`neuron_streams.compile`, whose executables are NEFFs of the double."""
    return on_double(neuron_streams.compile(function, example_inputs, target=target, **how))


class HostedModel(Model):
    """A model of the double that runs a command of Python's."""

    failure = None


class HostedRequests(Requests):
    """Requests of a runtime whose executables may be handles of Python, and of operators.

    The model of such a command has its tensors where all are on its core, so that the double sees
    who reads and writes what.
    """

    def route(self, command, device, lane):
        if command.kind == Kind.OPERATOR:
            return Route(self._queue(device, self._library.units.compute, 0), True)
        return super().route(command, device, lane)

    def of(self, command, queue):
        if command.kind == Kind.OPERATOR:
            return iter([self._hosted(command, [(b, 0) for b in command.reads], queue)])
        return super().of(command, queue)

    def _execute(self, command, queue):
        if isinstance(command.handle, Model):
            return super()._execute(command, queue)
        return self._hosted(command, command.inputs, queue)

    def _hosted(self, command, inputs, queue):
        number, made = next(_numbers), command.outputs
        written = [b for b in command.mutated if b not in [given for given, _ in inputs]]
        buffers = [*(b for b, _ in inputs), *made, *written]
        lines = ["double-neff", f"kernel host {number}"]
        given = [(b, start, b.nbytes - start) for b, start in inputs if b.nbytes - start]
        made = [(b, 0, b.nbytes) for b in (*made, *written) if b.nbytes]
        made += [item for item in given if item[0] in command.mutated]
        if len(given) + len(made) > MOST or any(b.device != queue.device for b in buffers):
            given, made = [], []
        lines += [f"input i{n} 10 1 {size}" for n, (_, _, size) in enumerate(given)]
        lines += [f"output o{n} 10 1 {size}" for n, (_, _, size) in enumerate(made)]
        payload = Payload("neff", command.name, Neff(("\n".join(lines) + "\n").encode()))
        model = HostedModel.load(self._library, payload, queue.device)
        self.runtime._models.append(model)
        _running[number] = command, model, self.runtime._inside, self.ticket
        memory, sets = self._memories[queue.device], self._sets.take(model.handle)
        tensors = [
            [memory.slice(block_of(b, b.device), start, size) for b, start, size in items]
            for items in (given, made)
        ]
        sets.fill(
            [(b"i%d" % n, tensor) for n, tensor in enumerate(tensors[0])],
            [(b"o%d" % n, tensor) for n, tensor in enumerate(tensors[1])],
        )
        arguments = model.handle, sets.inputs, sets.outputs
        schedule = self._library.nrta_execute_schedule
        return Request(queue, schedule, arguments, (command, model), sets)


_running = {}
_numbers = itertools.count(1)


_archives = {}


@KEEP
def _keep_archive(address, size):
    try:
        with tempfile.NamedTemporaryFile(suffix=".neff") as file:
            Path(file.name).write_bytes(ctypes.string_at(address, size))
            signature, payload = archive.read(file.name)
        number = next(_numbers)
        _archives[number] = signature, load_on_cpu(payload, 0)
    except Exception:
        traceback.print_exc()
        return 0
    return number


def _run_archive(signature, handle, inputs, outputs):
    try:
        given = [_tensor_at(inputs[n], spec) for n, spec in enumerate(signature.inputs)]
        with torch.inference_mode():
            made = handle.run(given)
        for n, result in enumerate(made):
            whole = result.contiguous()
            ctypes.memmove(outputs[n], whole.data_ptr(), whole.nbytes)
    except Exception:
        traceback.print_exc()
        return EXECUTION_FAILED
    return 0


def _tensor_at(address, spec):
    nbytes = spec.dtype.itemsize * torch.Size(spec.shape).numel()
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=spec.dtype).view(spec.shape)


@HOST
def _run_hosted(number, inputs, outputs):
    if number in _archives:
        return _run_archive(*_archives[number], inputs, outputs)
    command, model, inside, ticket = _running.pop(number)
    inside.here = True
    model.failure = command.attempt(ticket)
    return EXECUTION_FAILED if model.failure is not None else 0


def unsteady(abi, seed=0, devices=2, **how):
    """A runtime on a double with small queues, which is late unevenly and refuses now and then."""
    drawn = random.Random(seed)
    runtime = DoubleRuntime(devices, abi, in_flight=drawn.randint(1, 5), **how)
    double = runtime.double
    double.set_depth(drawn.randint(1, 4))
    double.set_latency(0, drawn.choice([0, 100_000, 500_000]))
    for device in range(devices):
        for unit in {double.read, double.write, double.copy, double.compute}:
            double.refuse(device, unit, 0, drawn.randint(0, 3), Status.QUEUE_FULL)
    return runtime


class DoubleRuntime(NrtRuntime):
    """The nrt runtime on a double of its own. `double` are the knobs.

    Args:
        reachable: whether the host reaches the memory of the device, which on hardware it does not.
            Handles of Python need it.
    """

    def __init__(self, devices=2, abi="2.30", reachable=True, **kwargs):
        self.double = Double(abi)
        self.double.set_cores(devices)
        self.forgiven = False
        self.reachable = self.reaches_memory = reachable
        super().__init__(Library(self.double.path), **kwargs)
        found = self._requests
        self._requests = HostedRequests(self._library, found._memories, found._sets, found._queue)
        self._requests.runtime = weakref.proxy(self)

    def _lease(self, memory, nbytes):
        lease = super()._lease(memory, nbytes)
        if self.reachable:
            lease.address = self.double.address_of(lease.block.tensor)
        return lease

    def _begin(self, step, queue):
        self._requests.ticket = step.ticket
        return super()._begin(step, queue)

    def _failed(self, step, status):
        hosted = step.kind in (Kind.EXECUTE, Kind.OPERATOR) and step.request is not None
        model = step.request.kept[1] if hosted else None
        return getattr(model, "failure", None) or super()._failed(step, status)

    def close(self, timeout=None):
        closed = self._closed
        super().close(timeout)
        if not closed and not self.forgiven:
            assert self.double.violations() == []
