"""A process ends cleanly whatever autograd and the device are doing at that moment."""

import pytest

from tests.torch_backend import children
from tests.torch_backend.device import DEVICE

ENDS = {
    "right after a backward": "",
    "with the gradients unread and a hook pending": """
x = torch.ones(64, 64, device=D, requires_grad=True)
x.register_post_accumulate_grad_hook(lambda p: [p.grad.add_(1), None][1])
(x @ x).sum().backward()
""",
    "inside a backward on a side stream": """
s = torch.Stream(D) if D != "cpu" else contextlib.nullcontext()
with s:
    loss.sum().backward()
""",
    "with tensors in globals and cycles": """
class Cycle: pass
a, b = Cycle(), Cycle()
a.b, b.a, a.x = b, a, torch.ones(1000, device=D) + 1
""",
    "with a daemon thread in a backward": """
started = threading.Event()
def loop():
    while True:
        layer(torch.ones(8, 64, device=D)).square().mean().backward()
        started.set()
threading.Thread(target=loop, daemon=True).start()
started.wait()
""",
    "with a daemon thread in a function of Python inside a backward": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): return g * g.sum().item()
started = threading.Event()
x = torch.ones(8, 8, device=D, requires_grad=True)
def loop():
    while True:
        Doubled.apply(x).sum().backward()
        started.set()
threading.Thread(target=loop, daemon=True).start()
started.wait()
""",
    "by an exception": "import signal; raise SystemExit(0)",
    "with an iterator of a loader open": """
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loader = iter(torch.utils.data.DataLoader(data, 2, pin_memory=D != "cpu"))
next(loader)
""",
}
PRELUDE = f"""
import contextlib
import threading
import torch
import neuron_streams
D = {DEVICE!r}
"""
BACKWARD = """
layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).to(D)
loss = layer(torch.ones(8, 64, device=D)).square().mean()
loss.backward()
loss = layer(torch.ones(8, 64, device=D)).square()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends(name):
    times = 50 if not ENDS[name] else 8
    scripts = {str(i): BACKWARD + ENDS[name] for i in range(times)}
    ended = children.run(scripts, PRELUDE, seconds=20.0)
    assert {str(x) for x in ended.values()} == {"0: "}


# Exit functions run newest first, so that one registered before the import comes after the end of
# the device. Autograd's thread has been overtaken then, which a backward must not wait for.
LATE_PRELUDE = """
import atexit
last = []
atexit.register(lambda: [function() for function in last])
import threading
import torch
import neuron_streams
"""
LATE = """
x = torch.ones(2, device="neuron:0", requires_grad=True)
y, gradient, host = x * 2, torch.ones(2, device="neuron:0"), torch.ones(2, requires_grad=True)
y.backward(gradient, retain_graph=True)
def late():
    host.sum().backward()
    try:
        y.backward(gradient)
    except RuntimeError as error:
        print(host.grad.tolist(), "is closed" in str(error), flush=True)
last.append(late)
"""
BESIDE = """
started = threading.Event()
def loop():
    while True:
        (x * 2).sum().backward()
        started.set()
threading.Thread(target=loop, daemon=True).start()
started.wait()
"""


def test_an_exit_function_after_the_end_of_the_device_calls_backward():
    ended = children.run({"alone": LATE, "beside a daemon thread": LATE + BESIDE}, LATE_PRELUDE)
    assert {str(x) for x in ended.values()} == {"0: [1.0, 1.0] True\n"}
