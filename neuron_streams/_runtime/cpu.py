"""How a CPU runs a command, and what a failure does to the buffers that the command names."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from neuron_streams._runtime.port import (
    Buffer,
    Command,
    Copy,
    Execute,
    Failure,
    Marker,
    Operator,
    Pledge,
    Sleep,
    View,
)

__all__ = ["HOST", "blame", "prepare", "run", "settle", "tensor_of"]

HOST = torch.device("cpu")  # said each time: the user may have torch default to another device


def tensor_of(view: View) -> torch.Tensor:
    """The host tensor that shares a view's memory; allocates the buffer at its first use."""
    buffer = view.buffer
    if buffer.storage is None:
        buffer.storage = torch.UntypedStorage(buffer.nbytes)  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=view.dtype, device=HOST)
    return empty.set_(buffer.storage, view.offset, view.size, view.stride)


def prepare(command: Command) -> Callable[[], None]:
    """All of a command but its run, which is what comes back, to be called on this thread.

    Every call of torch lets go of the GIL, and a host that wants it keeps it for milliseconds: who
    wakes the host between the two loses no time of the device.
    """
    if isinstance(command, Execute):
        return functools.partial(_execute, command, [tensor_of(view) for view in command.inputs])
    return functools.partial(run, command)


def run(command: Command) -> None:
    """Run a command to its end on the calling thread, which is in inference mode."""
    if isinstance(command, Execute):
        prepare(command)()
    elif isinstance(command, Copy):
        _copy(command)
    elif isinstance(command, Operator):
        _operate(command)
    elif isinstance(command, Sleep):
        if command.seconds > 0:  # sleep(0) costs 50 us
            time.sleep(command.seconds)
    else:
        raise TypeError(f"{command.name!r} is completed by the runtime, there is nothing to run")


def _execute(command: Execute, inputs: Sequence[torch.Tensor]) -> None:
    results = command.handle.run(inputs)
    if len(results) != len(command.outputs):
        raise RuntimeError(
            f"{command.name}: {len(command.outputs)} outputs were promised, {len(results)} came"
        )
    for buffer, result in zip(command.outputs, results, strict=True):
        buffer.storage = result.untyped_storage()


def _copy(command: Copy) -> None:
    source, target = command.source, command.target
    source = tensor_of(source) if isinstance(source, View) else source
    target = tensor_of(target) if isinstance(target, View) else target
    target.copy_(source)


def _operate(command: Operator) -> None:
    args = _host(command.args)
    kwargs = {name: _host(value) for name, value in command.kwargs.items()}
    results = command.op(*args, **kwargs)
    if not command.outputs:
        return
    fresh = results if isinstance(results, tuple | list) else (results,)
    for buffer, result in zip(command.outputs, fresh, strict=True):
        buffer.storage = result.untyped_storage()


def _host(value: Any) -> Any:
    """Views become host tensors, in the containers that operator schemas know."""
    if isinstance(value, View):
        return tensor_of(value)
    if isinstance(value, list | tuple):
        return type(value)(_host(item) for item in value)
    return value


def _reads(command: Command) -> Iterator[Buffer]:
    if isinstance(command, Execute):
        for view in command.inputs:
            yield view.buffer
    elif isinstance(command, Copy):
        if isinstance(command.source, View):
            yield command.source.buffer
    elif isinstance(command, Operator):
        yield from command.reads


def blame(command: Command) -> Failure | None:
    """The failure that keeps a command from running: that of the first poisoned buffer it reads."""
    for buffer in _reads(command):
        if buffer.failure is not None:
            return buffer.failure
    return None


def settle(command: Command, failure: Failure | None) -> None:
    """Poison the fresh outputs of a failed command; cure what a successful one overwrote whole.

    A tensor that is updated in place is not poisoned: its owner is told by the outputs, and only
    the owner knows which rows were touched.
    """
    if isinstance(command, Marker | Pledge | Sleep):
        return
    if isinstance(command, Copy):
        target = command.target
        if isinstance(target, View) and target.whole:
            target.buffer.failure = failure
        elif isinstance(target, View) and failure is not None:
            target.buffer.failure = target.buffer.failure or failure
        return
    for buffer in command.outputs:
        buffer.failure = failure
    if isinstance(command, Operator) and failure is None and command.overwrites:
        for view in command.mutated:
            if view.whole:
                view.buffer.failure = None
