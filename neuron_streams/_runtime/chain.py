"""How a compiled program runs: its libraries opened, its steps in one call without the GIL.

`chain.c` walks the steps. Tensors become handles of libtorch's C ABI and back by two private
functions of torch that its own Python wrapper of AOTInductor rests on; `supported` says whether
they are there.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import extension
from .program import Layout, Library, Program, Run, words

__all__ = ["ProgramHandle"]

_TO_HANDLES = "unsafe_alloc_void_ptrs_from_tensors"
_TO_TENSORS = "alloc_tensors_by_stealing_from_void_ptrs"


class ProgramHandle:
    """A program loaded on one device: an instance of each library. Runs on the calling thread.

    Inputs must have the dtypes, sizes and strides of `program.inputs`: nothing is checked here.
    Thread-safe: a run keeps its values to itself. Raises RuntimeError if a library cannot be
    loaded or a step fails, with the words of the library.
    """

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self._program = program
        self._instances = [_Instance(library) for library in program.libraries]
        self._chain = _Chain(program, self._instances)
        self.address = ctypes.addressof(self._chain.table)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run to the end with the GIL free and return fresh outputs."""
        outputs, failed = self._chain.run(inputs)
        if failed:
            raise RuntimeError(f"{self.name}: {self._complaint(failed)}")
        return outputs

    def _complaint(self, failed: int) -> str:
        step = self._program.steps[failed - 1] if failed > 0 else None
        if not isinstance(step, Run):
            return f"step {failed} failed. There may be no memory left."
        return self._instances[step.library].last_error()


class _Instance:
    """One library, opened, with a container of its own."""

    def __init__(self, library: Library) -> None:
        if not library.path.exists():
            raise RuntimeError(
                f"{library.path} has gone from the cache since it was compiled. Compile again."
            )
        self._open = ctypes.CDLL(str(library.path))
        self.container = ctypes.c_void_p()
        create = self._open.AOTInductorModelContainerCreateWithDevice
        if create(ctypes.byref(self.container), ctypes.c_size_t(1), b"cpu", None):
            raise RuntimeError(f"{library.path} does not load: {self.last_error()}")
        self.entry = self._open.AOTInductorModelContainerRun
        delete = self._open.AOTInductorModelContainerDelete
        weakref.finalize(self, delete, self.container).atexit = False

    def asks(self) -> int | None:
        """The address of the function that says why a run failed, for chain.c."""
        return _address(getattr(self._open, "AOTInductorGetLastError", None))

    def last_error(self) -> str:
        ask = getattr(self._open, "AOTInductorGetLastError", None)
        if ask is None:  # torch before 2.13 says it on stderr alone
            return "a compiled library failed; its words are on stderr."
        words = ctypes.c_char_p()
        ask(ctypes.byref(words))
        return (words.value or b"a compiled library failed").decode(errors="replace").strip()


class _Chain:
    """The program as chain.c takes it. Everything it points to is kept here."""

    def __init__(self, program: Program, instances: list[_Instance]) -> None:
        code = list(itertools.chain.from_iterable(words(program)))
        runs = [step for step in program.steps if isinstance(step, Run)]
        layouts = [word for layout in program.inputs for word in _layout_words(layout)]
        self._inputs = (ctypes.c_int64 * len(layouts))(*layouts)
        entries = [_LibraryEntry(_address(i.entry), i.asks(), i.container) for i in instances]
        self._libraries = (_LibraryEntry * len(instances))(*entries)
        self._code = (ctypes.c_int64 * len(code))(*code)
        self._weights = _handles(program.weights)
        weakref.finalize(self, _release, self._weights).atexit = False
        self._results = (ctypes.c_int64 * len(program.results))(*program.results)
        self._shims = _shims()
        self.table = _ProgramEntry(
            ctypes.pointer(self._shims),
            self._libraries,
            self._code,
            len(code),
            len(program.inputs),
            self._inputs,
            len(program.weights),
            program.value_count,
            max((max(len(run.inputs), len(run.outputs)) for run in runs), default=0),
            self._weights,
            len(program.results),
            self._results,
        )
        self._given = ctypes.c_void_p * len(program.inputs)
        self._made = ctypes.c_void_p * len(program.results)
        self._reference = ctypes.byref(self.table)
        self._run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3)(
            ("ns_run", ctypes.CDLL(extension.load().__file__))
        )

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        given, made = self._given(*[tensor.data_ptr() for tensor in inputs]), self._made()
        failed = self._run(self._reference, given, made)
        return ([], failed) if failed else (_tensors(made), 0)


class _LibraryEntry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("run", "last_error", "container")]


_SHIMS = {
    "wrap": "aoti_torch_create_tensor_from_blob",
    "retain": "aoti_torch_new_tensor_handle",
    "release": "aoti_torch_delete_tensor_object",
    "slice": "aoti_torch__reinterpret_tensor",
    "strides": "aoti_torch_get_strides",
    "offset": "aoti_torch_get_storage_offset",
    "dtype": "aoti_torch_get_dtype",
    "empty": "aoti_torch_empty_strided",
    "copy": "aoti_torch_copy_",
}


class _Shims(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _SHIMS]


class _ProgramEntry(ctypes.Structure):
    _fields_ = [
        ("shims", ctypes.POINTER(_Shims)),
        ("libraries", ctypes.POINTER(_LibraryEntry)),
        ("code", ctypes.POINTER(ctypes.c_int64)),
        ("code_length", ctypes.c_int64),
        ("input_count", ctypes.c_int64),
        ("inputs", ctypes.POINTER(ctypes.c_int64)),
        ("weight_count", ctypes.c_int64),
        ("value_count", ctypes.c_int64),
        ("widest", ctypes.c_int64),
        ("weights", ctypes.POINTER(ctypes.c_void_p)),
        ("result_count", ctypes.c_int64),
        ("results", ctypes.POINTER(ctypes.c_int64)),
    ]


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _handles(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """New handles of the tensors, owned by whoever is given them."""
    capsules = getattr(torch._C._aoti, _TO_HANDLES)(list(tensors))
    return (ctypes.c_void_p * len(capsules))(*[_pointer(capsule, None) for capsule in capsules])


def _tensors(handles: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of handles, which are theirs from now on."""
    capsules = [_capsule(handle, None, None) for handle in handles]
    made: list[torch.Tensor] = getattr(torch._C._aoti, _TO_TENSORS)(capsules)
    return made


def _release(handles: Iterable[Any]) -> None:
    release = _libtorch().aoti_torch_delete_tensor_object
    for handle in handles:
        release(ctypes.c_void_p(handle))


@functools.cache
def _libtorch() -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))


def _shims() -> _Shims:
    return _Shims(*(_address(getattr(_libtorch(), symbol)) for symbol in _SHIMS.values()))


def _layout_words(layout: Layout) -> list[int]:
    name = str(layout.dtype).removeprefix("torch.")
    dtype = getattr(_libtorch(), f"aoti_torch_dtype_{name}")()
    return [dtype, len(layout.size), *layout.size, *layout.stride]


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
