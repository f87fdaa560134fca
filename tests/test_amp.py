"""torch.cuda.amp's names, for the device "neuron"."""

import warnings

import pytest
import torch

from neuron_streams import amp


def test_autocast_is_of_the_device_and_of_float16():
    x = torch.ones(2, 2, device="neuron")
    with amp.autocast():
        assert (x @ x).dtype is torch.float16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    with amp.autocast(False):
        assert (x @ x).dtype is torch.float32

    @amp.autocast()
    def product():
        return x @ x

    assert product().dtype is torch.float16


def test_nothing_warns_that_it_is_deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.autocast()
        amp.GradScaler()
        amp.custom_fwd(lambda ctx: None)
        amp.custom_bwd(lambda ctx: None)
    assert amp.amp_definitely_not_available() is False


def test_a_dtype_that_the_device_cannot_cast_to_warns_and_is_off():
    with pytest.warns(UserWarning, match="(?i)autocast"), amp.autocast(dtype=torch.float64):
        x = torch.ones(2, 2, device="neuron")
        assert (x @ x).dtype is torch.float32


def test_the_scaler_skips_a_step_whose_gradients_are_not_finite():
    weight = torch.nn.Parameter(torch.ones(2, device="neuron"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = amp.GradScaler(init_scale=4.0)
    scaler.scale((weight * 2).sum()).backward()
    assert weight.grad.tolist() == [8.0, 8.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0, -1.0]
    weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1.0, -1.0]
    assert scaler.get_scale() == 2.0


def test_a_function_is_cast_as_it_asks():
    class Square(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            assert not torch.is_autocast_enabled("neuron")
            return x * x

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    half = torch.full((2,), 3.0, dtype=torch.float16, device="neuron", requires_grad=True)
    with amp.autocast():
        y = Square.apply(half)
    assert y.dtype is torch.float32
    y.sum().backward()
    assert half.grad.tolist() == [6.0, 6.0]
