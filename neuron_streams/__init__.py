"""torch.cuda's streams and events for AWS Neuron, emulated where there is no native support.

Importing makes "neuron" a device name; the first use of anything loads the extension and starts the
runtime. What torch.cuda has and this has not is in `neuron_streams.surface`; calling it raises what
to use instead. A module without an underscore is public; the others are what those are made of.

streams.py          Stream, Event, ExternalStream, StreamContext, and the functions around them
memory.py           statistics, limits and pinned memory
random.py           the devices' generators
amp.py comm.py nvtx.py   the submodules that CUDA programs name
executables.py      compile, Executable
decode/             the decode loop
errors.py           the exceptions that are not Python's or torch's own
surface.py          the table of names against torch.cuda's, from _surface_rows.py
testing.py          gates, and a runtime of a test's own
doctor.py           what `neuron-streams doctor` examines; _native.py tries native streams
_device.py          devices: which there are, which is current, and what they are like
_stream.py _event.py _external.py   what streams.py shows
_context.py         the runtime as the stream layer sees it
_exit.py            waits that outlive the main thread
_torch/             what is done to torch
_compiler/          from a function to an executable
_runtime/           the asynchronous NEFF runtime: one port, several implementations
"""

from typing import TYPE_CHECKING

from neuron_streams import amp as amp
from neuron_streams import comm as comm
from neuron_streams import nvtx as nvtx
from neuron_streams import testing as testing
from neuron_streams._device import _DeviceGuard as _DeviceGuard
from neuron_streams._device import _exchange_device as _exchange_device
from neuron_streams._device import _is_in_bad_fork as _is_in_bad_fork
from neuron_streams._device import _lazy_call as _lazy_call
from neuron_streams._device import _lazy_init as _lazy_init
from neuron_streams._device import _maybe_exchange_device as _maybe_exchange_device
from neuron_streams._device import _set_stream_by_id as _set_stream_by_id
from neuron_streams._device import _sleep as _sleep
from neuron_streams._device import can_device_access_peer as can_device_access_peer
from neuron_streams._device import current_device as current_device
from neuron_streams._device import device as device
from neuron_streams._device import device_count as device_count
from neuron_streams._device import device_of as device_of
from neuron_streams._device import get_amp_supported_dtype as get_amp_supported_dtype
from neuron_streams._device import get_device_capability as get_device_capability
from neuron_streams._device import get_device_name as get_device_name
from neuron_streams._device import get_device_properties as get_device_properties
from neuron_streams._device import get_sync_debug_mode as get_sync_debug_mode
from neuron_streams._device import init as init
from neuron_streams._device import is_available as is_available
from neuron_streams._device import is_bf16_supported as is_bf16_supported
from neuron_streams._device import is_current_stream_capturing as is_current_stream_capturing
from neuron_streams._device import is_initialized as is_initialized
from neuron_streams._device import set_device as set_device
from neuron_streams._device import set_sync_debug_mode as set_sync_debug_mode
from neuron_streams._device import synchronize as synchronize
from neuron_streams._runtime.cache import cache_folder as cache_folder
from neuron_streams.errors import AcceleratorError as AcceleratorError
from neuron_streams.errors import CudaError as CudaError
from neuron_streams.errors import DeferredCudaCallError as DeferredCudaCallError
from neuron_streams.errors import OutOfMemoryError as OutOfMemoryError
from neuron_streams.errors import UnsupportedError as UnsupportedError
from neuron_streams.errors import check_error as check_error
from neuron_streams.executables import Executable as Executable
from neuron_streams.executables import compile as compile
from neuron_streams.memory import empty_cache as empty_cache
from neuron_streams.memory import (
    get_per_process_memory_fraction as get_per_process_memory_fraction,
)
from neuron_streams.memory import host_memory_stats as host_memory_stats
from neuron_streams.memory import (
    host_memory_stats_as_nested_dict as host_memory_stats_as_nested_dict,
)
from neuron_streams.memory import max_memory_allocated as max_memory_allocated
from neuron_streams.memory import max_memory_reserved as max_memory_reserved
from neuron_streams.memory import mem_get_info as mem_get_info
from neuron_streams.memory import memory_allocated as memory_allocated
from neuron_streams.memory import memory_reserved as memory_reserved
from neuron_streams.memory import memory_stats as memory_stats
from neuron_streams.memory import memory_stats_as_nested_dict as memory_stats_as_nested_dict
from neuron_streams.memory import memory_summary as memory_summary
from neuron_streams.memory import (
    reset_accumulated_host_memory_stats as reset_accumulated_host_memory_stats,
)
from neuron_streams.memory import (
    reset_accumulated_memory_stats as reset_accumulated_memory_stats,
)
from neuron_streams.memory import reset_max_memory_allocated as reset_max_memory_allocated
from neuron_streams.memory import reset_peak_host_memory_stats as reset_peak_host_memory_stats
from neuron_streams.memory import reset_peak_memory_stats as reset_peak_memory_stats
from neuron_streams.memory import (
    set_per_process_memory_fraction as set_per_process_memory_fraction,
)
from neuron_streams.random import default_generators as default_generators
from neuron_streams.random import get_rng_state as get_rng_state
from neuron_streams.random import get_rng_state_all as get_rng_state_all
from neuron_streams.random import initial_seed as initial_seed
from neuron_streams.random import manual_seed as manual_seed
from neuron_streams.random import manual_seed_all as manual_seed_all
from neuron_streams.random import seed as seed
from neuron_streams.random import seed_all as seed_all
from neuron_streams.random import set_rng_state as set_rng_state
from neuron_streams.random import set_rng_state_all as set_rng_state_all
from neuron_streams.streams import Event as Event
from neuron_streams.streams import ExternalStream as ExternalStream
from neuron_streams.streams import NeuronStream as NeuronStream
from neuron_streams.streams import Stream as Stream
from neuron_streams.streams import StreamContext as StreamContext
from neuron_streams.streams import current_stream as current_stream
from neuron_streams.streams import default_stream as default_stream
from neuron_streams.streams import get_stream_from_external as get_stream_from_external
from neuron_streams.streams import set_stream as set_stream
from neuron_streams.streams import stream as stream

if not TYPE_CHECKING:

    def __dir__():
        return sorted(
            name
            for name in globals()
            if name.startswith("__") or (not name.startswith("_") and name != "TYPE_CHECKING")
        )

    def __getattr__(name):
        import sys

        from neuron_streams import surface

        if name == "_initialized":  # torch.utils.checkpoint keeps random states only where it is so
            return is_initialized()

        absent = surface.placeholder(name)
        if absent is not None:
            return absent
        error = surface.missing(name, "torch.cuda", "torch.neuron")
        # `from neuron_streams import name` asks by hasattr, and keeps the answer to itself.
        asks = sys._getframe(1).f_globals.get("__name__")
        if asks in ("importlib._bootstrap", "_frozen_importlib"):
            error = surface.not_importable(error)
        raise error


def _register() -> None:
    import sys

    from neuron_streams._context import register_name

    register_name(sys.modules[__name__])


def _name_classes() -> None:
    """Have the public classes say the package, as torch's do, and not the file they are in."""
    for name, value in globals().items():
        is_public = not name.startswith("_") and isinstance(value, type)
        if is_public and value.__module__.startswith("neuron_streams."):
            value.__module__ = "neuron_streams"


_register()
_name_classes()
del _register, _name_classes
