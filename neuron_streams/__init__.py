"""torch.cuda's streams and events for AWS Neuron, emulated where there is no native support.

The doors: each name below lives in the module of its noun. Nothing happens at import; the first use
of anything starts the runtime and registers the device "neuron".
"""

from neuron_streams import testing as testing
from neuron_streams.device import _is_in_bad_fork as _is_in_bad_fork
from neuron_streams.device import _sleep as _sleep
from neuron_streams.device import current_device as current_device
from neuron_streams.device import device as device
from neuron_streams.device import device_count as device_count
from neuron_streams.device import get_device_capability as get_device_capability
from neuron_streams.device import get_device_name as get_device_name
from neuron_streams.device import get_device_properties as get_device_properties
from neuron_streams.device import init as init
from neuron_streams.device import is_available as is_available
from neuron_streams.device import is_initialized as is_initialized
from neuron_streams.device import manual_seed_all as manual_seed_all
from neuron_streams.device import set_device as set_device
from neuron_streams.device import synchronize as synchronize
from neuron_streams.errors import UnsupportedError as UnsupportedError
from neuron_streams.event import Event as Event
from neuron_streams.stream import NeuronStream as NeuronStream
from neuron_streams.stream import Stream as Stream
from neuron_streams.stream import StreamContext as StreamContext
from neuron_streams.stream import current_stream as current_stream
from neuron_streams.stream import default_stream as default_stream
from neuron_streams.stream import set_stream as set_stream
from neuron_streams.stream import stream as stream
from neuron_streams.tensor import NeuronTensor as NeuronTensor
