"""One generator a device: seeded, saved, restored, and independent of how lanes interleave."""

import pytest
import torch

import neuron_streams
from tests.torch_backend.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="generators of the device")


def test_a_seed_repeats():
    torch.manual_seed(5)
    a = (
        torch.rand(4, device=DEVICE),
        torch.randn(4, device=DEVICE),
        torch.randperm(9, device=DEVICE),
    )
    torch.manual_seed(5)
    b = (
        torch.rand(4, device=DEVICE),
        torch.randn(4, device=DEVICE),
        torch.randperm(9, device=DEVICE),
    )
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(torch.rand(4, device=DEVICE), a[0])


def test_each_device_has_its_own():
    neuron_streams.manual_seed_all(5)
    a, b = (torch.rand(4, device=f"{DEVICE}:{i}").cpu() for i in range(2))
    assert torch.equal(a, b)
    neuron_streams.manual_seed(6)
    assert not torch.equal(torch.rand(4, device=DEVICE).cpu(), a)
    with neuron_streams.device(1):
        neuron_streams.manual_seed(5)
        assert torch.equal(torch.rand(4, device=DEVICE).cpu(), a)


def test_the_host_is_not_touched():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    x = torch.ones(1, 2, 4, 8, device=DEVICE)
    torch.rand(100, device=DEVICE)
    torch.nn.functional.dropout(x)
    torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    neuron_streams.synchronize()
    assert torch.equal(torch.rand(3), expected)


def test_the_state_is_saved_and_restored():
    state = neuron_streams.get_rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    a = torch.rand(5, device=DEVICE)
    neuron_streams.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=DEVICE), a)
    states = neuron_streams.get_rng_state_all()
    b = torch.rand(5, device=f"{DEVICE}:1")
    neuron_streams.set_rng_state_all(states)
    assert torch.equal(torch.rand(5, device=f"{DEVICE}:1"), b)


def test_the_seed_is_known():
    neuron_streams.manual_seed(77)
    assert neuron_streams.initial_seed() == 77
    neuron_streams.seed()
    assert neuron_streams.initial_seed() != 77
    neuron_streams.seed_all()


def test_a_generator_of_ones_own():
    g, h = (torch.Generator(device=DEVICE).manual_seed(9) for _ in range(2))
    assert g.device == torch.device(DEVICE, 0) or g.device == torch.device(DEVICE)
    assert g.initial_seed() == 9
    a = torch.rand(4, device=DEVICE, generator=g)
    torch.rand(4, device=DEVICE)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=h), a)
    h.set_state(g.get_state())
    draws = [torch.empty(4, device=DEVICE).normal_(generator=x) for x in (g, h)]
    assert torch.equal(*draws)


def test_a_generator_of_the_wrong_device_is_refused():
    with pytest.raises(RuntimeError, match="Expected a '.*' device type for generator"):
        torch.rand(2, device=DEVICE, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected (a 'cpu' device type|all tensors)"):
        torch.rand(2, generator=torch.Generator(device=DEVICE))


def test_the_order_of_submission_decides():
    def draw(first, second):
        torch.manual_seed(4)
        with neuron_streams.stream(first):
            a = torch.rand(64, device=DEVICE)
        with neuron_streams.stream(second):
            b = torch.rand(64, device=DEVICE)
        return a, b, first, second

    from neuron_streams.testing import Gate

    streams = neuron_streams.Stream(), neuron_streams.Stream()
    free = [x.cpu() for x in draw(*streams)[:2]]
    gate = Gate(streams[0])
    a, b, *_ = draw(*streams)
    late = b.cpu()  # runs first, though it was asked for last
    gate.open()
    assert torch.equal(late, free[1])
    assert torch.equal(a.cpu(), free[0])


def test_dropout_in_backward_uses_the_mask_of_forward():
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_in_range_and_spread():
    x = torch.rand(10_000, device=DEVICE)
    assert 0 <= x.min().item() < x.max().item() < 1
    assert abs(x.mean().item() - 0.5) < 0.05
    assert abs(torch.randn(10_000, device=DEVICE).std().item() - 1) < 0.05
    counts = torch.bincount(torch.randint(4, (4000,), device=DEVICE))
    assert counts.min().item() > 800
