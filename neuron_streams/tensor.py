"""NeuronTensor: a tensor on a device, and a future.

It knows its buffer, and the buffer knows the ticket of the last command that writes it: reading the
tensor on the host waits for that ticket and no other. Below Python it is an empty wrapper whose
device index is always 0, because torch's Python backends know one device; `device`, `get_device`
and `to` tell the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from neuron_streams import memory
from neuron_streams._runtime.port import View
from neuron_streams.context import context, index_of
from neuron_streams.errors import UnsupportedError
from neuron_streams.stream import as_stream

__all__ = ["NeuronTensor"]

aten = torch.ops.aten


class NeuronTensor(torch.Tensor):
    """A device tensor. Made by `tensor.to("neuron")`, `torch.empty(..., device="neuron")` and
    executables, never by hand.

    Host: only reading its values waits. Source: a device tensor of torch.cuda; the implicit wait of
    its readers on other streams is the Neuron runtime's promise for the inputs of a NEFF.
    """

    _view: View

    @staticmethod
    def _wrap(view: View, requires_grad: bool = False) -> NeuronTensor:
        made: NeuronTensor = torch.Tensor._make_wrapper_subclass(
            NeuronTensor,
            view.size,
            strides=view.stride,
            storage_offset=view.offset,
            dtype=view.dtype,
            device=torch.device(_WRAPPED),
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
            raise _unsupported("to(dtype)")
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
        return format(self.detach().item(), spec) if self.dim() == 0 else super().__format__(spec)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
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
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        # In inference mode composite operators such as aten.to arrive here whole.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise _unsupported(str(func))
        return result


class _Move(torch.autograd.Function):
    """To another device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, source: NeuronTensor, index: int) -> NeuronTensor:
        ctx.index = source.get_device()
        return _moved(source, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad.to(torch.device("neuron", ctx.index)), None


def _form(tensor: NeuronTensor) -> tuple[object, ...]:
    view = tensor._view
    return view.dtype, view.size, view.stride


def _moved(source: NeuronTensor, index: int) -> NeuronTensor:
    size = tuple(source.shape)
    view = memory.empty(size, memory.contiguous(size), source.dtype, index)
    memory.copy_between(view, source._view)
    return NeuronTensor._wrap(view)


_WRAPPED = "neuron:0"


def _unsupported(what: str) -> UnsupportedError:
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


def _broadcasts(size: torch.Size, wanted: torch.Size) -> bool:
    """Whether a tensor of one size can be copied into one of another."""
    fits = all(a in (1, b) for a, b in zip(reversed(size), reversed(wanted), strict=False))
    return len(size) <= len(wanted) and fits


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """What `torch.tensor(values, device="neuron")` ends in."""
    return _copy_(target, source, non_blocking)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.shape != target.shape and not _broadcasts(source.shape, target.shape):
        raise RuntimeError(
            f"copy_: a tensor of shape {list(source.shape)} cannot be broadcast to "
            f"{list(target.shape)}; reshape it first"
        )
    if isinstance(target, NeuronTensor):
        if isinstance(source, NeuronTensor):
            memory.copy_between(target._view, source._view)
        else:
            memory.copy_into(target._view, source, non_blocking)
    elif isinstance(source, NeuronTensor):
        memory.to_host(source._view, target, non_blocking)
    return target


def _to_copy(
    source: NeuronTensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if device is None or device.type != "cpu":
        raise _unsupported("aten._to_copy on the device")
    out = _like(source, dtype or source.dtype, memory_format)
    if non_blocking:
        memory.mark_pinned(out)
    memory.to_host(source._view, out, non_blocking)
    return out


def _like(
    source: NeuronTensor, dtype: torch.dtype, memory_format: torch.memory_format | None
) -> torch.Tensor:
    """An empty host tensor laid out as torch would lay out a copy."""
    size, stride = source._view.size, source._view.stride
    if memory_format in (None, torch.preserve_format) and stride == memory.contiguous(size):
        return torch.empty(size, dtype=dtype)
    shape = torch.empty_strided(size, stride, device="meta")
    kept = torch.empty_like(shape, memory_format=memory_format or torch.preserve_format)
    return torch.empty_strided(kept.shape, kept.stride(), dtype=dtype)


def _local_scalar_dense(source: NeuronTensor) -> bool | int | float | complex:
    # Below autograd `source.cpu()` would come back as aten.to.
    value: bool | int | float | complex = _to_copy(source, device=torch.device("cpu")).item()
    return value


def _record_stream(tensor: NeuronTensor, stream: torch.Stream) -> None:
    """Nothing to keep: a command holds the buffers that it names until it has completed."""
    as_stream(stream)


def _alias(source: NeuronTensor) -> NeuronTensor:
    return NeuronTensor._wrap(source._view)


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return not isinstance(tensor, NeuronTensor) and memory.is_pinned(tensor)


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return memory.pin(tensor)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _local_scalar_dense,
    aten.record_stream.default: _record_stream,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.detach_.default: lambda tensor: tensor,
    aten.is_pinned.default: _is_pinned,
}


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> NeuronTensor:
    view = memory.empty(
        tuple(size), tuple(stride), dtype or torch.get_default_dtype(), index_of(device)
    )
    return NeuronTensor._wrap(view)


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> NeuronTensor:
    shape = tuple(size)
    strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return _empty_strided(shape, strides, dtype, layout, device, pin_memory)


_library: torch.library.Library | None = None


def register_factories() -> None:
    """Give torch what it needs to make a tensor on "neuron"; once, at the first use of anything."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in (
            ("empty.memory_format", _empty),
            ("empty_strided", _empty_strided),
            ("_copy_from", _copy_from),
        ):
            _library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
        if not torch.cuda.is_available():  # CUDA pins memory of its own
            for name, pinning in (("is_pinned", _is_pinned), ("_pin_memory", _pin_memory)):
                _library.impl(name, pinning, "CPU")  # type: ignore[no-untyped-call]
