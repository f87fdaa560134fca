"""A NEFF, loaded on a core: which tensors it takes and makes, and under which names.

Source: nrt_load, nrt_get_model_tensor_info (nrt_experimental.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.structs import TensorInfo, TensorInfos
from neuron_streams._runtime.port import Payload

__all__ = ["Model", "Neff", "Slot"]

_OUTPUT = 1  # nrt_tensor_usage_t
_ANY_CORES = -1  # what nrt_load wants for vnc_count


@dataclass(frozen=True, slots=True)
class Neff:
    """The content of a payload of format `"neff"`.

    `inputs` and `outputs` are its tensors in the order of a call, by name; None is the order of the
    file. `aliases` name the output that an input, by position, is updated through: both are the
    same memory, and a call makes no other for it. `constants` are further inputs, the same at each
    call, which all executables of a core share. `sizes` are what the caller takes the sizes of its
    tensors for, in bytes: the file's own are held against them. `target` is what it was made for.
    """

    content: bytes = field(repr=False)
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    aliases: Mapping[int, str] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    target: str = "neuron"


class Slot(NamedTuple):
    """A tensor of a model: its name there, and its size in bytes."""

    name: bytes
    nbytes: int


class Model:
    """A handle of the nrt runtime.

    `aliases` are pairs of an input's position and a Slot, `constants` names and tensors of inputs
    that are the same at each call.
    """

    def __init__(
        self, library: Library, name: str, device: int, handle: int, slots: Sequence[Sequence[Slot]]
    ) -> None:
        self.name = name
        self.device = device
        self.handle = handle
        self.inputs, self.outputs = slots
        self.aliases: dict[int, Slot] = {}
        self.constants: list[tuple[bytes, int]] = []
        self._library = library

    @classmethod
    def load(cls, library: Library, payload: Payload, device: int) -> Model:
        """Load a payload on a device. Raises ValueError if it does not fit, NrtError."""
        neff = payload.content
        if payload.format != "neff" or not isinstance(neff, Neff):
            raise ValueError(
                f"{payload.name}: neuron:{device} runs NEFFs, not the payload format "
                f"{payload.format!r}; load a .neff file, or use NEURON_STREAMS_RUNTIME=emulated"
            )
        handle = ctypes.c_void_p()
        library.call(
            "nrt_load",
            neff.content,
            len(neff.content),
            device,
            _ANY_CORES,
            ctypes.byref(handle),
            about=payload.name,
        )
        made = cls(library, payload.name, device, handle.value or 0, ((), ()))
        try:
            made._name(neff, made._infos())
        except BaseException:
            made.unload()
            raise
        return made

    def _infos(self) -> list[tuple[bool, Slot]]:
        infos = ctypes.POINTER(TensorInfos)()
        self._library.call(
            "nrt_get_model_tensor_info", self.handle, ctypes.byref(infos), about=self.name
        )
        count = infos.contents.tensor_count
        first = ctypes.addressof(infos.contents) + TensorInfos.tensor_array.offset
        array = (TensorInfo * count).from_address(first)
        found = [(info.usage == _OUTPUT, Slot(info.name, info.size)) for info in array]
        self._library.call("nrt_free_model_tensor_info", infos)
        return found

    def _name(self, neff: Neff, infos: Sequence[tuple[bool, Slot]]) -> None:
        inputs = {slot.name.decode(): slot for output, slot in infos if not output}
        outputs = {slot.name.decode(): slot for output, slot in infos if output}
        self._check_sizes(neff, {**inputs, **outputs})
        aliased = set(neff.aliases.values())
        fresh = [name for name in outputs if name not in aliased]
        given = [name for name in inputs if name not in neff.constants]
        self._pick("input", list(neff.constants), inputs, given, whole=False)
        self.inputs = self._pick("input", neff.inputs, inputs, given)
        self.outputs = self._pick("output", neff.outputs, outputs, fresh)
        names = list(neff.aliases.values())
        slots = self._pick("output", names, outputs, names, whole=False)
        for position, slot in zip(neff.aliases, slots, strict=True):
            if position >= len(self.inputs) or self.inputs[position].nbytes != slot.nbytes:
                raise ValueError(
                    f"{self.name}: output {slot.name.decode()!r} cannot be an alias of input "
                    f"{position}: their sizes differ; give the pairs that it was compiled with"
                )
            self.aliases[position] = slot

    def _check_sizes(self, neff: Neff, there: Mapping[str, Slot]) -> None:
        """The names that are not there are complained of elsewhere."""
        weights = {name: weight.nbytes for name, weight in neff.constants.items()}
        for name, nbytes in {**neff.sizes, **weights}.items():
            found = there.get(name)
            if found is not None and found.nbytes != nbytes:
                raise ValueError(
                    f"{self.name}: tensor {name!r} of the NEFF has {found.nbytes} bytes, and one "
                    f"of {nbytes} was described; give the dtypes and shapes that it was compiled "
                    "for"
                )

    def _pick(
        self,
        usage: str,
        wanted: Sequence[str] | None,
        there: Mapping[str, Slot],
        expected: Sequence[str],
        whole: bool = True,
    ) -> list[Slot]:
        names = expected if wanted is None else wanted
        if any(n not in there for n in names) or (whole and sorted(names) != sorted(expected)):
            raise ValueError(
                f"{self.name}: the NEFF has the {usage}s {list(expected)}, and {list(names)} were "
                "named; name each of them once, as the compiler did"
            )
        return [there[name] for name in names]

    def run(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        raise TypeError(f"{self.name}: a NEFF runs on the device, not on this thread")

    def unload(self) -> None:
        if self.handle:
            self._library.nrt_unload(self.handle)
            self.handle = 0
