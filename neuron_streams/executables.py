"""Executables: functions compiled once for static shapes, run as one command of a stream.

On Neuron hardware that is a NEFF. Where the CPU plays the device its stand-in is a chain of
AOTInductor libraries, which run without the GIL; where no C++ compiler is, the graph run by Python,
with the same results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils import _pytree as pytree
from typing_extensions import Self

from neuron_streams._compiler import archive
from neuron_streams._compiler.signature import Signature, TensorSpec, describe
from neuron_streams._context import context, core
from neuron_streams._runtime.port import Payload, Runtime

__all__ = ["Executable", "TensorSpec", "compile"]

Tensors: TypeAlias = "Sequence[torch.Tensor] | Mapping[str, torch.Tensor]"
Described: TypeAlias = "Mapping[str, torch.Tensor]"
_TARGETS = {"program": "cpu", "exported": "exported"}


def compile(  # noqa: A001  (torch spells it so)
    function: Callable[..., Any],
    example_inputs: Tensors,
    *,
    mutates: Sequence[str] = (),
    name: str | None = None,
    target: str | None = None,
) -> Executable:
    """Compile a function or module of tensors for the shapes and dtypes of its examples.

    Weights are not copied: all executables of a model share its parameters, which must not change
    afterwards. What was compiled is kept on disk by content. A layer that a model repeats is
    compiled once. A function that draws random numbers draws those of the device, which
    `manual_seed` begins; it runs as a graph, by Python.

    Args:
        function: returns a tensor, or a tuple or dict of tensors.
        example_inputs: host tensors in the order of the parameters, or under their names; only
            their shapes and dtypes count.
        mutates: the names of the inputs that the function updates in place, such as a KV cache.
        name: for errors, logs and traces; the function's own when None.
        target: `"cpu"` (compiled libraries), `"exported"` (the graph, run by Python) or a kind of
            Neuron core (`"trn1"`, `"trn1n"`, `"trn2"`, `"trn3"`, `"inf2"`), for which the compilers
            of AWS make a NEFF, in a process of their own, with `NEURON_STREAMS_NEURONX_PYTHON` or
            this Python; None takes that of the device in use, or the best there is on a CPU.

    Raises:
        ValueError: `mutates` does not fit what the function does, it depends on values of tensors,
            or it updates a tensor of its own.
        TypeError: it takes or returns something that is not a tensor.
        RuntimeError: the compiler fails or does not end; with its output.
        OSError: the cache folder cannot be used; see `cache_folder`.

    Host: waits for the compilers, seconds for each part that is not in the cache.
    Source: torch_neuronx.trace.
    """
    from neuron_streams._compiler.build import build  # not at import: it loads half of torch

    context()  # the first use of anything makes "neuron" a device
    name = name or getattr(function, "__name__", type(function).__name__).lower()
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    names = (mutates,) if isinstance(mutates, str) else tuple(mutates)
    with torch.device("cpu"):  # the user may have torch default to the device
        return Executable(*build(function, examples, names, name, target))


class Executable:
    """A compiled function. Calling it submits one command and returns device tensors at once.

    Made by `compile` or `Executable.load`.
    """

    def __init__(self, signature: Signature, payload: Payload) -> None:
        self._signature = signature
        self._payload = payload
        self._name = signature.name
        self._loaded: dict[int, tuple[Runtime, Any]] = {}
        self._mutated = tuple(
            n for n, spec in enumerate(signature.inputs) if spec.name in signature.mutates
        )
        self._rebuild = _rebuilder(signature.structure)

    @property
    def name(self) -> str:
        """The name given to `compile`."""
        return self._signature.name

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes, in order."""
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What it returns, flat."""
        return self._signature.outputs

    @property
    def mutates(self) -> tuple[str, ...]:
        """The names of the inputs that it updates in place."""
        return self._signature.mutates

    @property
    def target(self) -> str:
        """What `compile` calls a target; `"neuron"` where a NEFF does not say for which core."""
        if self._payload.format == "neff":
            return str(self._payload.content.target)
        return _TARGETS[self._payload.format]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run on the current stream.

        A host tensor is copied into a fresh device buffer at the call, so it may be changed at
        once. Every result is a fresh tensor that nothing overwrites, also where the function
        returns an input or a view of one.

        Returns:
            device tensors in the structure that the function returns.

        Raises:
            TypeError, ValueError: a wrong number, dtype, shape, layout or device of an input.

        Host: returns at once. Stream: runs it.
        """
        if len(tensors) != len(self._signature.inputs):
            raise self._wrong_count(len(tensors))
        found = context()
        device = core().current_device()
        loaded = self._loaded.get(device)
        call = loaded[1] if loaded and loaded[0] is found.runtime else self._load(device)
        try:
            results = call(tensors)
        except TypeError:  # what is no tensor
            results = None
        if results is None:
            self._explain(tensors, device)
        return self._rebuild(results)

    def _load(self, device: int) -> Any:
        found = context()
        handle = found.runtime.load(self._payload, device)
        inputs, outputs = (
            [(spec.dtype, spec.shape, spec.stride) for spec in specs]
            for specs in (self.inputs, self.outputs)
        )
        program = getattr(handle, "address", None) or 0
        draws = bool(getattr(handle, "draws", False))
        made = core().Loaded(self._name, inputs, outputs, self._mutated, program, handle, draws)
        self._loaded[device] = (found.runtime, made.call)
        return made.call

    def _explain(self, tensors: Sequence[object], device: int) -> NoReturn:
        """Raise what is wrong with the arguments of a call that was refused."""
        for number, tensor in enumerate(tensors):
            self._check(number, tensor, device)
        self._check_apart(tensors)
        raise ValueError(f"{self.name}: these arguments cannot be used: {tensors}.")

    def _check(self, number: int, tensor: object, device: int) -> None:
        spec = self._signature.inputs[number]
        where = f"{self.name}: input {spec.name!r}"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where} expects a tensor, got {type(tensor).__name__}.")
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise (TypeError if tensor.dtype != spec.dtype else ValueError)(
                f"{where} expects {describe(spec.dtype, spec.shape)}, "
                f"got {describe(tensor.dtype, tensor.shape)}. Shapes are fixed when it is compiled."
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{where} is {tensor.layout}. Give it {spec.name}.to_dense().")
        if tensor.device.type == "neuron":
            _check_placed(where, tensor, device)
        elif not tensor.is_cpu:
            raise ValueError(f"{where} is on {tensor.device}. Copy it to neuron:{device} first.")
        elif number in self._mutated:
            raise ValueError(
                f"{where} is updated in place, so it must be on the device, and it is a host "
                f'tensor. Give it {spec.name}.to("neuron:{device}"), and keep that.'
            )

    def _check_apart(self, tensors: Sequence[object]) -> None:
        for n in self._mutated:
            for m, other in enumerate(tensors):
                if m != n and _share(tensors[n], other):
                    names = [self.inputs[place].name for place in sorted((m, n))]
                    raise ValueError(
                        f"{self.name}: inputs {names} share memory, and {self.inputs[n].name!r} is "
                        "updated in place. Give it a tensor of its own."
                    )

    def _wrong_count(self, given: int) -> TypeError:
        expected = ", ".join(map(str, self.inputs))
        return TypeError(
            f"{self.name} takes {len(self.inputs)} tensors ({expected}), and {given} were given."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, weights and all; whole or not at all. Host: waits for the disk."""
        archive.write(path, self._signature, self._payload)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        inputs: Described | None = None,
        outputs: Described | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> Self:
        """Read one that `save` wrote, or any NEFF. It is code: load only what you trust.

        A NEFF needs to be described, since it does not say all that a call must know.

        Args:
            inputs: of a NEFF: a tensor like each that it takes, in the order of a call, under the
                name that the compiler gave it. Only shapes and dtypes count; meta tensors will do.
            outputs: the same of what it makes.
            aliases: the output that each input is updated through, by name, as it was compiled
                with: both are one tensor, so `outputs` need not have it.

        Raises:
            ValueError: the file is damaged or foreign, or made for another processor or torch. The
                description of a NEFF is held against it when it is loaded on a device, at the
                first call.
            OSError: the file cannot be read, or the cache folder cannot be used.

        Example:
            >>> x = torch.empty(4, device="meta")
            >>> step = Executable.load("step.neff", inputs={"x": x}, outputs={"y": x})

        Host: waits for the disk.
        """
        if inputs is None and outputs is None and aliases is None:
            return cls(*archive.read(path))
        return cls(*archive.read_neff(path, inputs or {}, outputs or {}, aliases or {}))

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        mutates = f", mutates={list(self.mutates)}" if self.mutates else ""
        return f"<Executable {self.name}({inputs}) -> ({outputs}){mutates}, target={self.target!r}>"


def _share(one: Any, other: Any) -> bool:
    starts = [tensor.storage_offset() * tensor.itemsize for tensor in (one, other)]
    apart = starts[0] >= starts[1] + other.nbytes or starts[1] >= starts[0] + one.nbytes
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and not apart


def _check_placed(where: str, tensor: torch.Tensor, device: int) -> None:
    if tensor.get_device() != device:
        raise ValueError(
            f"{where} is on {tensor.device}, but the current stream is on "
            f'neuron:{device}. Use .to("neuron:{device}"), or a stream of that device.'
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{where} has strides {tensor.stride()}, but device tensors are read as contiguous. "
            "Make a contiguous copy first."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{where} is a conjugate or negative view. Give it its resolve_conj().resolve_neg()."
        )
    if (
        tensor.untyped_storage().nbytes()
        < tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    ):
        raise ValueError(f"{where} reaches outside its storage, which was resized.")


def _rebuilder(structure: pytree.TreeSpec) -> Callable[[list[torch.Tensor]], Any]:
    """How flat results become what the function returns; the usual cases without pytree."""
    if structure.is_leaf():
        return lambda results: results[0]
    if structure.type in (tuple, list) and structure.num_leaves == structure.num_children:
        kind: Callable[[list[torch.Tensor]], Any] = structure.type
        return kind
    return lambda results: pytree.tree_unflatten(results, structure)
