"""`import neuron_streams` makes "neuron" a device name and nothing more; first use does more."""

import pytest

from tests.torch_backend import children

AFTER_IMPORT = {
    "nothing has started": """
import threading
import neuron_streams
assert threading.active_count() == 1
assert len(os.listdir("/proc/self/task")) == before, os.listdir("/proc/self/task")
assert not neuron_streams.is_initialized()
assert not any(name.startswith("neuron_streams.decode") for name in sys.modules)
""",
    "torch.device names it": """
import neuron_streams
assert torch.device("neuron").type == "neuron"
assert torch.device("neuron:1").index == 1
assert torch.device("neuron", 1) == torch.device("neuron:1")
assert not neuron_streams.is_initialized()
""",
    "torch.neuron is the module": """
import neuron_streams
assert torch.neuron is neuron_streams
assert torch.get_device_module("neuron") is neuron_streams
""",
    "the accelerator is ours": """
import neuron_streams
assert torch.accelerator.current_accelerator().type == "neuron"
assert torch.accelerator.is_available()
assert torch.accelerator.device_count() == neuron_streams.device_count()
""",
    "the usual line chooses it": """
import neuron_streams
device = torch.device("neuron" if neuron_streams.is_available() else "cpu")
assert torch.ones(2, device=device).device == torch.device("neuron:0")
""",
    "a default argument names it": """
import neuron_streams
def work(device=torch.device("neuron")):
    return torch.ones(3, device=device).sum().item()
assert work() == 3.0
""",
    "module.neuron() is the first use": """
import neuron_streams
model = torch.nn.Linear(2, 2).neuron()
assert model.weight.device == torch.device("neuron:0")
assert model.weight.is_neuron and not model.weight.is_cuda
assert torch.ones(1).neuron(1).device == torch.device("neuron:1")
""",
    "torch.Stream and torch.Event ask no Python, so they are no first use": """
import neuron_streams
for make in (torch.Stream, torch.Event):
    try:
        make("neuron")
    except RuntimeError as error:
        assert "neuron" in str(error), error
    else:
        raise AssertionError("made without a backend")
neuron_streams.init()
assert torch.Stream("neuron").device == torch.device("neuron:0")
""",
    "torch.Stream": """
import neuron_streams
neuron_streams.init()
a, b = torch.Stream("neuron"), torch.Stream("neuron:1")
assert a.stream_id != torch.Stream("neuron").stream_id
assert (a.device, b.device) == (torch.device("neuron:0"), torch.device("neuron:1"))
with a:
    assert torch.accelerator.current_stream() == a
    assert neuron_streams.current_stream().stream_id == a.stream_id
assert torch.accelerator.current_stream() != a
""",
    "torch.Event": """
import neuron_streams
neuron_streams.init()
event = torch.Event("neuron", enable_timing=True)
event.record()
later = torch.Event("neuron", enable_timing=True)
later.record()
later.synchronize()
assert event.query() and later.query()
assert event.elapsed_time(later) >= 0
""",
    "pinning is the first use": """
import neuron_streams
assert torch.ones(3).pin_memory().is_pinned() and neuron_streams.is_initialized()
assert "pin_memory" not in vars(torch.Tensor)
""",
    "pinning a storage is the first use": """
import neuron_streams
assert torch.ones(3).untyped_storage().pin_memory().is_pinned()
""",
    "a data loader that pins is the first use": """
import neuron_streams
from torch.utils.data import DataLoader
batches = list(DataLoader(torch.arange(4.0), 2, pin_memory=True))
assert [x.tolist() for x in batches] == [[0.0, 1.0], [2.0, 3.0]]
assert all(x.is_pinned() for x in batches)
""",
    "caches of the accelerator": """
import neuron_streams
neuron_streams.init()
torch.accelerator.empty_cache()
torch.accelerator.empty_host_cache()
torch.accelerator.reset_peak_memory_stats()
kept = torch.ones(2, device="neuron"), torch.ones(2).pin_memory()
torch.accelerator.empty_host_cache()
assert kept[0].tolist() == kept[1].tolist() and kept[1].is_pinned()
""",
    "a default device": """
import neuron_streams
torch.set_default_device("neuron")
assert torch.ones(2).device == torch.device("neuron:0")
with torch.device("neuron:1"):
    assert torch.nn.Linear(2, 2).weight.device == torch.device("neuron:1")
""",
    "the second device is there": """
import neuron_streams
neuron_streams.set_device(1)
assert neuron_streams.current_device() == 1 == torch.accelerator.current_device_index()
assert torch.ones(1, device="neuron").device == torch.device("neuron:1")
with torch.accelerator.device_index(0):
    assert torch.ones(1, device="neuron").device == torch.device("neuron:0")
""",
    "a device that is absent": """
import neuron_streams
for make in (lambda: torch.ones(1, device="neuron:7"), lambda: torch.ones(1).to("neuron:7"),
             lambda: torch.Stream("neuron:7"), lambda: neuron_streams.Stream(7)):
    try:
        make()
    except (RuntimeError, ValueError) as error:
        assert "7" in str(error), error
    else:
        raise AssertionError("made on a device that does not exist")
""",
    "the name again is no fault": """
import importlib
import neuron_streams
neuron_streams.init()
torch.utils.rename_privateuse1_backend("neuron")
importlib.reload(neuron_streams)
assert torch.ones(2, device="neuron").tolist() == [1.0, 1.0]
""",
    "another backend holds the slot": """
torch.utils.rename_privateuse1_backend("npy")
import neuron_streams
try:
    neuron_streams.Stream()
except RuntimeError as error:
    assert "npy" in str(error), error
else:
    raise AssertionError("two backends in one slot")
""",
    "a native backend holds the name": """
import types
native = types.ModuleType("torch.neuron")
native.current_device = lambda: 0
torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", native)
import neuron_streams
assert torch.neuron is native
try:
    neuron_streams.init()
except RuntimeError as error:
    assert "native" in str(error) or "torch-neuronx" in str(error), error
""",
    "a worker process imports it, too": """
import neuron_streams
import multiprocessing as mp
import pickle
assert pickle.loads(pickle.dumps(torch.device("neuron:1"))) == torch.device("neuron:1")
""",
    "what it lacks says so": """
import neuron_streams
try:
    torch.ones(2).cuda()
except (AssertionError, RuntimeError):
    pass
assert not torch.cuda.is_available()
""",
}


# One thread of autograd for each device, whenever torch counts them.
COUNTED = """
import pathlib
def autograds():
    names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith("pt_autograd"))
def backward(device):
    x = torch.ones(2, requires_grad=True, device=device)
    x.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
SCRIPT
backward("neuron:1")
backward("cpu")
assert autograds() == ["pt_autograd_0", "pt_autograd_1"], autograds()
"""
AFTER_IMPORT |= {
    name: COUNTED.replace("SCRIPT", script)
    for name, script in {
        "a backward of the host before the import": """
backward("cpu")
import neuron_streams
""",
        "a backward of the host before the first use": """
import neuron_streams
backward("cpu")
""",
        "a backward of the host starts the runtime": """
import neuron_streams
neuron_streams._context.core()
backward("cpu")
""",
        "a backward of the device is the first": """
import neuron_streams
""",
    }.items()
}

# Whatever is called first, the device is there.
FIRST = {
    "is_available()": "assert neuron_streams.is_available()",
    "device_count()": "assert neuron_streams.device_count() == 2",
    "empty_cache()": "neuron_streams.empty_cache()",
    "Event()": "neuron_streams.Event().record()",
    "Stream()": "neuron_streams.Stream().synchronize()",
    "current_device()": "assert neuron_streams.current_device() == 0",
    "synchronize()": "neuron_streams.synchronize()",
    "manual_seed(3)": "neuron_streams.manual_seed(3)",
    "memory_allocated()": "assert neuron_streams.memory_allocated() == 0",
    "get_device_name()": "assert neuron_streams.get_device_name()",
    "torch.accelerator": "assert torch.accelerator.is_available()",
}
AFTER_IMPORT |= {
    f"{name} comes first": f"""
import neuron_streams
{call}
x = torch.ones(2, device="neuron")
assert x.data_ptr() and (x + 1).tolist() == [2.0, 2.0] and x.device == torch.device("neuron:0")
"""
    for name, call in FIRST.items()
}


@pytest.fixture(scope="module")
def ended():
    prelude = "import os\nimport sys\nimport torch\nbefore = len(os.listdir('/proc/self/task'))\n"
    return children.run(AFTER_IMPORT, prelude, NEURON_STREAMS_DEVICE_COUNT="2")


@pytest.mark.parametrize("name", AFTER_IMPORT)
def test_after_the_import(ended, name):
    assert ended[name].code == 0, str(ended[name])
    assert ended[name].err == ""
