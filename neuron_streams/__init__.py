"""torch.cuda's streams and events for AWS Neuron, emulated where there is no native support.

The doors: each name below lives in the module of its noun. Importing makes "neuron" a device name;
the first use of anything loads the extension and starts the runtime. What torch.cuda has and this
has not is in `neuron_streams.surface`; calling it raises what to use instead.
"""

from typing import TYPE_CHECKING

from neuron_streams import amp as amp
from neuron_streams import comm as comm
from neuron_streams import nvtx as nvtx
from neuron_streams import testing as testing
from neuron_streams._runtime.cache import cache_folder as cache_folder
from neuron_streams.device import _DeviceGuard as _DeviceGuard
from neuron_streams.device import _exchange_device as _exchange_device
from neuron_streams.device import _is_in_bad_fork as _is_in_bad_fork
from neuron_streams.device import _lazy_call as _lazy_call
from neuron_streams.device import _lazy_init as _lazy_init
from neuron_streams.device import _maybe_exchange_device as _maybe_exchange_device
from neuron_streams.device import _set_stream_by_id as _set_stream_by_id
from neuron_streams.device import _sleep as _sleep
from neuron_streams.device import can_device_access_peer as can_device_access_peer
from neuron_streams.device import current_device as current_device
from neuron_streams.device import device as device
from neuron_streams.device import device_count as device_count
from neuron_streams.device import device_of as device_of
from neuron_streams.device import get_amp_supported_dtype as get_amp_supported_dtype
from neuron_streams.device import get_device_capability as get_device_capability
from neuron_streams.device import get_device_name as get_device_name
from neuron_streams.device import get_device_properties as get_device_properties
from neuron_streams.device import get_sync_debug_mode as get_sync_debug_mode
from neuron_streams.device import init as init
from neuron_streams.device import is_available as is_available
from neuron_streams.device import is_bf16_supported as is_bf16_supported
from neuron_streams.device import is_current_stream_capturing as is_current_stream_capturing
from neuron_streams.device import is_initialized as is_initialized
from neuron_streams.device import set_device as set_device
from neuron_streams.device import set_sync_debug_mode as set_sync_debug_mode
from neuron_streams.device import synchronize as synchronize
from neuron_streams.errors import AcceleratorError as AcceleratorError
from neuron_streams.errors import CudaError as CudaError
from neuron_streams.errors import DeferredCudaCallError as DeferredCudaCallError
from neuron_streams.errors import OutOfMemoryError as OutOfMemoryError
from neuron_streams.errors import UnsupportedError as UnsupportedError
from neuron_streams.errors import check_error as check_error
from neuron_streams.event import Event as Event
from neuron_streams.executable import Executable as Executable
from neuron_streams.executable import compile as compile
from neuron_streams.external import ExternalStream as ExternalStream
from neuron_streams.external import get_stream_from_external as get_stream_from_external
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
from neuron_streams.stream import NeuronStream as NeuronStream
from neuron_streams.stream import Stream as Stream
from neuron_streams.stream import StreamContext as StreamContext
from neuron_streams.stream import current_stream as current_stream
from neuron_streams.stream import default_stream as default_stream
from neuron_streams.stream import set_stream as set_stream
from neuron_streams.stream import stream as stream

if not TYPE_CHECKING:

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

    from neuron_streams.context import register_name

    register_name(sys.modules[__name__])


_register()
del _register
