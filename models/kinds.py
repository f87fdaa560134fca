"""The kinds of step, put together: what computes logits, what chooses, and what is kept.

{greedy,sampled,adjusted}_prefill    [gathered_]{greedy,sampled,adjusted}_decode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn, where

from models.choosers import CHOOSERS, SAMPLING_TABLES
from models.layers import Weights
from models.packed import Packed
from models.steps import Decode
from neuron_streams.decode.logprobs import split
from neuron_streams.decode.model import Sampled

__all__ = ["Compile", "Executable", "Step"]

Executable: TypeAlias = Callable[..., Any]

_LAYERS: dict[str, type[Packed] | type[Decode]] = {"prefill": Packed, "decode": Decode}


class Compile(Protocol):
    """The signature of `neuron_streams.compile`, as far as a model uses it.

    The module is called with its inputs by name, the executable with them in the same order.
    """

    def __call__(
        self,
        fn: nn.Module,
        example_inputs: Mapping[str, Tensor],
        /,
        *,
        mutates: Sequence[str] = (),
        name: str | None = None,
    ) -> Executable: ...


class Step(nn.Module):
    """A step of one kind, whose inputs come by name.

    A prefill, which may carry rows that decode, also keeps the sampling parameters of its slots. It
    and a gathered decode step keep the tokens that they sample, and take for negative ids those
    that were kept.

    Attributes:
        inputs: The names of what the host gives, in order.
        state: The names of the model's tensors that it uses, in order.
        mutates: Those of them that it updates in place.
    """

    def __init__(self, kind: str, weights: Weights, length: int) -> None:
        super().__init__()
        *how, choice, phase = kind.split("_")
        self.layers = _LAYERS[phase](weights, length)
        self.chooser = CHOOSERS[choice]()
        self.keeps = phase == "prefill"
        self.gathers = self.keeps or how == ["gathered"]
        self._owner = "owners" if self.keeps else "slots"
        kept = tuple(SAMPLING_TABLES) if self.keeps else ()
        fields = (field for field, _ in SAMPLING_TABLES.values()) if self.keeps else ()
        tables = tuple(dict.fromkeys((*kept, *self.chooser.tables)))
        last = ("last_sampled",) if self.gathers else ()
        self.inputs = (*self.layers.inputs, *fields)
        self.state = ("kv_cache", *tables, *last)
        written = {"kv_cache", *kept, "token_counts", *last}
        self.mutates = tuple(name for name in self.state if name in written)

    def forward(self, **tensors: Tensor) -> Sampled:
        """The token that follows each row's; with log-probabilities where it is adjusted."""
        slots = tensors["slots"].long()
        if self.keeps:
            for table, (field, _) in SAMPLING_TABLES.items():
                tensors[table].index_put_((slots,), tensors[field])
        if self.gathers:
            known = tensors["input_ids"]
            owners = tensors[self._owner].long()
            tensors["input_ids"] = where(known < 0, tensors["last_sampled"][owners], known)
        given = [tensors[name] for name in self.layers.inputs]
        logits = self.layers(*given, tensors["kv_cache"])
        chosen: Sampled = self.chooser(logits, self.layers.span(*given), slots, tensors)
        if self.gathers:
            tensors["last_sampled"].index_put_((slots,), split(chosen)[0])
        return chosen
