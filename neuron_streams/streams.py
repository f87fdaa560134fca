"""Streams and events, spelled as in torch.cuda.streams, and the functions around them.

The door: each name lives in a module of its own, `_stream`, `_event` and `_external`.
"""

from neuron_streams._event import Event
from neuron_streams._external import ExternalStream, get_stream_from_external
from neuron_streams._stream import (
    NeuronStream,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "Event",
    "ExternalStream",
    "NeuronStream",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
    "set_stream",
    "stream",
]
