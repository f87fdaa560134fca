"""Tensors that were made to break the device: an error each, and never the end of the process."""

import pytest

from tests.torch_backend import children
from tests.torch_backend.device import DEVICE

SCRIPTS = {
    "a stride below the storage": "torch.empty_strided((2, 2), (-10**9, 1), device=D)",
    "a stride far outside": "torch.ones(4, device=D).as_strided((2, 2), (10**9, 1)).tolist()",
    "an offset outside": "torch.ones(4, device=D).as_strided((2,), (1,), 10**12).sum().item()",
    "a negative offset": "torch.ones(4, device=D).as_strided((2,), (1,), -5)",
    "sizes that overflow": "torch.empty(2**40, 2**40, device=D)",
    "strides that overflow": "torch.empty_strided((2, 2), (2**62, 2**62), device=D)",
    "more than there is": "torch.empty(2**50, device=D)",
    "a negative size": "torch.empty(-1, device=D)",
    "a storage resized to 0, read": """
x = torch.ones(4, device=D); x.untyped_storage().resize_(0); x.tolist()""",
    "a storage resized to 0, computed with": """
x = torch.ones(4, device=D); x.untyped_storage().resize_(0); (x + 1).tolist()""",
    "a storage resized to 0, written": """
x = torch.ones(4, device=D); x.untyped_storage().resize_(0); x.fill_(2); x.add_(x)
M.synchronize()""",
    "a storage resized to 0 behind a gate": """
x = torch.ones(1000, device=D)
if D != "cpu":
    gate = M.testing.Gate()
y = x + 1
x.untyped_storage().resize_(0)
if D != "cpu":
    gate.open()
assert y.tolist() == [2.0] * 1000
raise RuntimeError("fine")""",
    "a view of a storage resized to 0": """
x = torch.ones(4, device=D); y = x[2:]; x.untyped_storage().resize_(4); y.tolist()""",
    "set_ to a smaller storage": """
x = torch.ones(2, device=D); torch.empty(0, device=D).set_(x.untyped_storage(), 0, (9,), (1,))
torch.empty(0, device=D).set_(x.untyped_storage(), 8, (9,), (1,)).tolist()
raise RuntimeError("fine: it has grown")""",
    "set_ to a storage of the host": """
torch.empty(0, device=D).set_(torch.ones(2).untyped_storage()) if D != "cpu" else 1 / 0""",
    "an index outside": "torch.ones(3, device=D)[torch.tensor([7], device=D)].tolist()",
    "a negative index outside": "torch.ones(3, device=D)[torch.tensor([-7], device=D)].tolist()",
    "an index written outside": """
x = torch.ones(3, device=D); x[torch.tensor([9**9], device=D)] = 1; x.tolist()""",
    "scatter outside": """
torch.zeros(3, device=D).scatter_(0, torch.tensor([5], device=D), 1.0).tolist()""",
    "gather outside": "torch.zeros(3, device=D).gather(0, torch.tensor([5], device=D)).tolist()",
    "index_select outside": """
torch.zeros(3, device=D).index_select(0, torch.tensor([5], device=D)).tolist()""",
    "an embedding outside": """
torch.nn.functional.embedding(torch.tensor([99], device=D), torch.ones(3, 2, device=D)).tolist()""",
    "a class outside": """
x = torch.ones(1, 3, device=D)
torch.nn.functional.cross_entropy(x, torch.tensor([7], device=D)).item()""",
    "overlapping writes": "torch.ones(1, device=D).expand(4).add_(1)",
    "two devices in one operator": """
torch.ones(2, device=D) + torch.ones(2, device=D + ":1") if D != "cpu" else 1 / 0""",
    "host and device in one operator": """
torch.ones(2, device=D) + torch.ones(2) if D != "cpu" else 1 / 0""",
    "out on the host": """
torch.add(torch.ones(2, device=D), 1, out=torch.ones(2)) if D != "cpu" else 1 / 0""",
    "a device that is absent": "torch.ones(2, device=D + ':77')",
    "a stream of an absent device": """
torch.accelerator.set_stream(torch.Stream(stream_id=3, device_index=77, device_type=20))""",
    "a stream id that was never given": """
s = torch.Stream(stream_id=123456, device_index=0, device_type=20)
torch.accelerator.set_stream(s)
torch.ones(2, device=D)
M.synchronize()
raise RuntimeError("fine")""",
    "events of a stream id that was never given": """
s = torch.Stream(stream_id=987654, device_index=0, device_type=20)
s.record_event().synchronize()
s.synchronize()
raise RuntimeError("fine")""",
    "record_stream of such a stream": """
torch.ones(2, device=D).record_stream(
    torch.Stream(stream_id=987654, device_index=55, device_type=20))""",
    "record_stream of a host stream": "torch.ones(2, device=D).record_stream(torch.Stream('cpu'))",
    "numpy() without a copy": "torch.ones(2, device=D).numpy() if D != 'cpu' else 1 / 0",
    "requires_grad of integers": "torch.ones(2, dtype=torch.int64, device=D).requires_grad_()",
    "a wrong shape": "torch.ones(2, 3, device=D) @ torch.ones(2, 3, device=D)",
    "a wrong dtype": "torch.ones(2, device=D) @ torch.ones(2, dtype=torch.int64, device=D)",
    "an empty reduction": "torch.ones(0, device=D).max()",
    "an unsupported dtype": "torch.ones(2, dtype=torch.complex64, device=D) < 1",
    "a singular matrix": "torch.linalg.inv(torch.zeros(2, 2, device=D))",
    "a division of integers by zero": """
(torch.ones(2, dtype=torch.int64, device=D) // 0).tolist()""",
    "views of another dtype": "torch.ones(3, dtype=torch.uint8, device=D).view(torch.float32)",
    "pinned sizes that overflow": "torch.empty(2**60, pin_memory=True)",
    "a copy of a freed storage": """
h = torch.ones(4); h.untyped_storage().resize_(0); torch.ones(4, device=D).copy_(h)
M.synchronize()""",
    "a copy into a freed storage": """
h = torch.ones(4); h.untyped_storage().resize_(0); h.copy_(torch.ones(4, device=D))
M.synchronize()""",
    "deep recursion of views": """
x = torch.ones(2, device=D)
for _ in range(20000):
    x = x[:]
x.tolist()
raise RuntimeError("fine")""",
    "a tensor with 64 dimensions": "torch.ones([1] * 64, device=D).sum().item(); 1 / 0",
    "a tensor with 65 dimensions": "torch.ones([1] * 65, device=D).permute(*range(65)); 1 / 0",
    "a graph of freed buffers": """
x = torch.ones(2, device=D, requires_grad=True); y = (x * x).sum(); y.backward(); y.backward()""",
    "a tensor of the host, indexed by one of the device": """
y = torch.arange(3.0)[torch.tensor([1], device=D)]
if D == "cpu":
    raise ValueError("the CPU may")""",
    "a quantized tensor": """
torch.quantize_per_tensor(torch.ones(3, device=D), 0.1, 0, torch.qint8)
if D == "cpu":
    raise ValueError("the CPU may")""",
    "a sparse tensor": """
torch.eye(3, device=D).to_sparse_csr()
if D == "cpu":
    raise ValueError("the CPU may")""",
    "a gradient of another shape": """
x = torch.ones(2, device=D, requires_grad=True); x.grad = torch.ones(3, device=D)""",
    "a gradient of another device": """
x = torch.ones(2, device=D, requires_grad=True)
x.grad = torch.ones(2, device="meta")""",
}
# What has no error, on CUDA or on the CPU, is fine as well: these may end with any value.
SILENT = {"a division of integers by zero", "a view of a storage resized to 0"}
PRELUDE = f"""
import torch
import neuron_streams as M
D = {DEVICE!r}
torch.ones(1, dtype=torch.int64, device="meta") // 1  # imports sympy, once for all children
"""
GUARD = """
try:
{body}
except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, OverflowError,
        ZeroDivisionError, AssertionError) as error:
    assert str(error).strip(), "an error without a sentence"
    print("refused:", type(error).__name__, str(error).splitlines()[0][:120])
"""


@pytest.fixture(scope="module")
def ended():
    body = {
        name: GUARD.format(body="\n".join("    " + line for line in text.strip().splitlines()))
        for name, text in SCRIPTS.items()
    }
    return children.run(body, PRELUDE, seconds=20.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_error_and_no_crash(ended, name):
    assert ended[name].code == 0, str(ended[name])
    if name not in SILENT:
        assert ended[name].out.startswith("refused:"), str(ended[name])
