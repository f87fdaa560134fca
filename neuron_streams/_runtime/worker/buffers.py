"""Device memory that C and Python share."""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch

from neuron_streams._runtime import chain
from neuron_streams._runtime.lanes import SMALL_COPY
from neuron_streams._runtime.ledger import Ledger
from neuron_streams._runtime.port import Buffer, Failure
from neuron_streams._runtime.worker.library import Library

__all__ = ["NativeBuffer"]

_DATA, _OWNER, _NBYTES, _POISONED = range(4)
_Words = ctypes.c_int64 * 4


class NativeBuffer(Buffer):
    """A buffer whose memory may be made by C; see `ns_buffer` in worker.h.

    What C made becomes a storage when Python asks for it. Whether the buffer is poisoned is C's to
    say, by what is Python's.
    """

    __slots__ = ("_failure", "_library", "_storage", "address", "words")

    def __init__(self, device: int, nbytes: int, ledger: Ledger, library: Library) -> None:
        # Not the base's, whose storage and failure cost calls here: this is made for each output.
        self.device = device
        self.nbytes = nbytes
        self.ledger: Ledger = ledger
        ledger.born(nbytes)
        self.writer = None
        self.named = False
        self.words = words = _Words()
        words[_NBYTES] = nbytes
        self.address = addressof(words)
        self._library = library
        self._storage: torch.UntypedStorage | None = None
        self._failure: Failure | None = None

    @property
    def storage(self) -> torch.UntypedStorage | None:
        data, known = self.words[_DATA], self._storage
        if known is not None and known.data_ptr() == data:
            return known
        owned = self._library.share(self.address)
        if owned:
            self._storage = chain._tensors([owned])[0].untyped_storage()
        return self._storage

    @storage.setter
    def storage(self, storage: torch.UntypedStorage | None) -> None:
        self._storage = storage
        if storage is not None:
            self._library.point(self.address, storage.data_ptr())

    def fill(self, source: torch.Tensor) -> None:
        lazy = source.is_neg() or source.is_conj()
        if type(source) is not torch.Tensor or lazy or not source.is_contiguous():
            super().fill(source)
            return
        fill = self._library.fill if self.nbytes <= SMALL_COPY else self._library.fill_slowly
        if fill(self.address, source.data_ptr()):
            raise MemoryError(f"neuron:{self.device} has no memory for {self.nbytes} bytes")

    @property
    def failure(self) -> Failure | None:
        return self._failure if self.words[_POISONED] else None

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self._failure = failure
        self.words[_POISONED] = failure is not None

    def __del__(self, word: int = _OWNER) -> None:
        owner = self.words[word]  # bound above: at exit the module's names may be gone
        if owner:
            self._library.release(owner)
        self.ledger.dead(self.nbytes)
