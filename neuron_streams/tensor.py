"""NeuronTensor: a tensor on a device, and a future.

It knows its buffer, and the buffer knows the ticket of the last command that writes it: reading the
tensor on the host waits for that ticket and no other. Below Python it is an empty wrapper whose
device index is always 0, because torch's Python backends know one device; `device`, `get_device`
and `to` tell the truth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from neuron_streams import memory
from neuron_streams._runtime.port import View
from neuron_streams.context import context, index_of
from neuron_streams.errors import UnsupportedError
from neuron_streams.stream import current_stream, stream

__all__ = ["NeuronTensor"]

_make = torch.Tensor._make_wrapper_subclass
# What is done for an aten operator on device tensors; `ops` fills it.
HANDLERS: dict[Any, Callable[..., Any]] = {}


class NeuronTensor(torch.Tensor):
    """A device tensor. Made by `tensor.to("neuron")`, `torch.empty(..., device="neuron")` and
    executables, never by hand.

    Host: only reading its values waits. Source: a device tensor of torch.cuda; the implicit wait of
    its readers on other streams is the Neuron runtime's promise for the inputs of a NEFF.
    """

    _view: View

    @staticmethod
    def _wrap(view: View, requires_grad: bool = False) -> NeuronTensor:
        size, stride, dtype, device = view.size, view.stride, view.dtype, _wrapped()
        made: NeuronTensor
        if not (view.offset or requires_grad):  # a third less for what each step's outputs are
            made = _make(NeuronTensor, size, strides=stride, dtype=dtype, device=device)
        else:
            made = _make(
                NeuronTensor,
                size,
                strides=stride,
                storage_offset=view.offset,
                dtype=dtype,
                device=device,
                requires_grad=requires_grad,
            )
        made._view = view
        return made

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        raise TypeError(
            'NeuronTensor(...): device tensors are made by tensor.to("neuron") or '
            'torch.empty(..., device="neuron")'
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("neuron", self._view.buffer.device)

    def get_device(self) -> int:
        return self._view.buffer.device

    @property
    def is_ready(self) -> bool:
        """Whether the last command that writes the tensor has completed. Host: returns at once."""
        writer = self._view.buffer.writer
        return writer is None or context().runtime.completed(writer.lane) >= writer.value

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch.Tensor.to; another device index is another device."""
        args = _spelled_out(args)
        copy = kwargs.pop("copy", False)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if copy and device is None:
            device = self.device
        if device is None or device.type != "neuron":
            return super().to(*args, **kwargs)
        index = index_of(device)
        if dtype not in (None, self.dtype):
            raise unsupported("to(dtype)")
        if index == self.get_device() and not copy:
            return self
        if self.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Move.apply(self, index)  # type: ignore[no-untyped-call]
            return moved
        return _moved(self, index)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.to:  # of a host tensor, to the device of one of ours
            args = (args[0], *_spelled_out(args[1:]))
        elif func is torch.Tensor.type_as and isinstance(args[1], NeuronTensor):
            return args[0].to(args[1].device, args[1].dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.cpu(), self.get_device())

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A host copy. Host: waits for the tensor's own ticket and for the copy."""
        return self.to("cpu", memory_format=memory_format)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        """That of the number where there is one, as in torch. Host: waits for it."""
        if self.dim() == 0:
            return format(self.detach().item(), spec)
        return object.__format__(self, spec)

    @property
    def data(self) -> torch.Tensor:
        return NeuronTensor._wrap(self._view)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """What `Module.to` moves parameters by: the tensor is another from now on."""
        if not isinstance(other, NeuronTensor) or _form(other) != _form(self):
            raise UnsupportedError(
                f"data = ...: a device tensor of shape {list(self.shape)} and {self.dtype} can "
                "only become another of the same; assign it to the name instead"
            )
        self._view = other._view

    def share_memory_(self) -> Self:
        raise UnsupportedError(
            "share_memory_: device memory is not shared between processes; pickle the tensor, "
            "which sends a copy, or share x.cpu()"
        )

    def is_shared(self) -> bool:
        """False: no other process sees device memory."""
        return False

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert neuron:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return self.cpu().numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        poison = self._view.buffer.failure
        state = "ready" if self.is_ready else "pending"
        if poison is not None and self.is_ready:
            state = f"failed: {type(poison.error).__name__}"
        return (
            f"NeuronTensor(shape={list(self.shape)}, dtype={self.dtype}, "
            f"device='neuron:{self.get_device()}', {state})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        # In inference mode composite operators such as aten.to arrive here whole.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise unsupported(str(func))
        return result


class _Move(torch.autograd.Function):
    """To another device, and its gradient back, on the streams of the way there.

    As in torch.cuda; a thread of autograd has the default streams.
    """

    @staticmethod
    def forward(ctx: Any, source: NeuronTensor, index: int) -> NeuronTensor:
        ctx.streams = current_stream(index), current_stream(source.get_device())
        return _moved(source, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        giver, taker = ctx.streams
        with stream(giver), stream(taker):
            return grad.to(taker.device), None


def _form(tensor: NeuronTensor) -> tuple[object, ...]:
    view = tensor._view
    return view.dtype, view.size, view.stride


def _moved(source: NeuronTensor, index: int) -> NeuronTensor:
    size = tuple(source.shape)
    view = memory.empty(size, memory.contiguous(size), source.dtype, index)
    memory.copy_between(view, source._view)
    return NeuronTensor._wrap(view)


@functools.cache
def _wrapped() -> torch.device:
    """The device below Python; there is none of that name before the first use of ours."""
    return torch.device("neuron:0")


def unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: eager operators on Neuron tensors are not there yet; "
        "put the computation into neuron_streams.compile(), or copy the tensor to the host first"
    )


def _spelled_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`to(other)` as `to(device, dtype)`: below Python every device of ours has the index 0."""
    if args and isinstance(args[0], NeuronTensor):
        return (args[0].device, args[0].dtype, *args[1:])
    return args


def _rebuild(values: torch.Tensor, device: int) -> torch.Tensor:
    context()  # in a fresh process torch does not know the name yet
    return values.to(torch.device("neuron", min(device, context().count - 1)))
