"""Ids and handles of streams, and streams over lanes that another library opened.

Both are made as in torch.cuda: id 0 and handle 0 are the default stream; of the others, bit 0 of
the id tells ours (1) from another library's (0), whose id is its handle. A file of its own because
nobody else needs to know how a number becomes a stream.
"""

from __future__ import annotations

import operator
from typing import Any

from typing_extensions import Self

from neuron_streams._context import DeviceLike, context, core, index_of
from neuron_streams._stream import DEVICE_TYPE, NeuronStream, default_stream

__all__ = ["ExternalStream", "get_stream_from_external", "state_of"]


class ExternalStream(NeuronStream):
    """A stream over a lane that another library opened on the runtime and keeps open.

    Args:
        stream_ptr: its handle (`native_handle` of a stream); 0 is the default stream.
        device: where the lane is; None is the current device.

    Raises:
        RuntimeError: there is no such lane on the device.

    Host: returns at once. Source: torch.cuda.ExternalStream.
    """

    def __new__(cls, stream_ptr: int, device: DeviceLike = None, **kwargs: Any) -> Self:
        return cls._of(*state_of(device, stream_ptr=stream_ptr, **kwargs))

    def __init__(self, stream_ptr: int, device: DeviceLike = None, **kwargs: Any) -> None:
        pass  # torch.Stream is built in __new__


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> NeuronStream:
    """The stream of a handle; 0 is the default stream. See `ExternalStream`."""
    return NeuronStream(device, stream_ptr=data_ptr)


def state_of(
    device: DeviceLike,
    *,
    stream_id: int = 0,
    device_index: int | None = None,
    device_type: int = DEVICE_TYPE,
    stream_ptr: int | None = None,
    **unknown: object,
) -> tuple[Any, int]:
    """What the keywords of `Stream` stand for: the lane, and the id of the stream object."""
    if unknown:
        raise TypeError(f"Stream() got an unexpected keyword argument {next(iter(unknown))!r}")
    stream_id = operator.index(stream_id)
    if stream_ptr is not None:
        stream_ptr = operator.index(stream_ptr)
        return _of_handle(stream_ptr, index_of(device)), stream_ptr
    if device_type != DEVICE_TYPE:
        raise ValueError(
            f"Stream(device_type={device_type}): not a Neuron stream, whose device_type is "
            f"{DEVICE_TYPE}"
        )
    index = index_of(device if device_index is None else device_index)
    if not stream_id & 1:
        return _of_handle(stream_id, index), stream_id
    state = core().find_stream(stream_id, index)
    if state is None:
        raise RuntimeError(
            f"Stream(stream_id={stream_id}, device_index={index}): there is no such stream; "
            "it lives only as long as an object of it"
        )
    return state, stream_id


def _of_handle(handle: int, device: int) -> Any:
    if handle == 0:
        return default_stream(device)._state
    lane = handle >> 1
    state = None if handle & 1 else core().find_stream(handle, device)
    if state is not None:
        return state
    if handle & 1 or lane not in context().runtime.lanes(device):
        raise RuntimeError(
            f"ExternalStream({handle:#x}): there is no such lane on neuron:{device}; give the "
            "native_handle of a stream that is alive, and its device"
        )
    return core().foreign_stream(lane, device)
