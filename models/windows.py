"""Several decode steps in one executable, which feeds itself the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.choosers import CHOOSERS
from models.layers import Weights, norm, project
from models.steps import Decode, Span
from neuron_streams.decode.logprobs import split
from neuron_streams.decode.model import NO_TOKEN

__all__ = ["WindowStep"]


class Turn(nn.Module):
    """What lies between the layers of two steps: from hidden states to the next tokens.

    All turns of a window are alike and share their parameters, so that one is compiled.
    """

    def __init__(self, choice: str, weights: Weights) -> None:
        super().__init__()
        self.eps = weights.config.rms_norm_eps
        self.norm, self.head = weights.norm, weights.head
        self.chooser = CHOOSERS[choice]()

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor,
        at: Tensor,
        where: Tensor,
        count: Tensor,
        limits: Tensor,
        stops: Tensor,
        tables: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Tokens given, tokens to go on with, positions, slots, count; log-probabilities if any.

        Args:
            hidden: [rows, hidden], behind the layers.
            ids, at, where: int64 [rows]: the tokens that were computed, their positions and slots;
                slot 0 is a row that has stopped.
            count: int64 [rows], tokens of the window so far.
            limits, stops: As in `decode.Window`.
            tables: Of the slots.
        """
        logits = project(norm(hidden, self.norm, self.eps), self.head).float()
        live = where > 0
        span = Span(ids[:, None], at[:, None], live[:, None], at + 1, where)
        chosen = self.chooser(logits, span, where, tables)
        tokens, logprobs = split(chosen)
        given = torch.where(live, tokens, NO_TOKEN)
        count = count + live
        goes_on = live & (count < limits) & (tokens[:, None] != stops).all(1)
        ids = torch.where(live, tokens.long(), ids)
        at, where = torch.where(goes_on, at + 1, 0), torch.where(goes_on, where, 0)
        return given, ids, at, where, count, *(() if logprobs is None else logprobs)


class WindowStep(nn.Module):
    """So many decode steps of rows that stop each by itself; its inputs come by name.

    Negative ids stand for the tokens last sampled for the rows' slots.

    Attributes:
        inputs: The names of what the host gives, in order.
        state: The names of the model's tensors that it uses, in order.
        mutates: Those of them that it updates in place.
    """

    keeps = False
    inputs = ("input_ids", "positions", "slots", "limits", "stop_token_ids")

    def __init__(self, choice: str, num_steps: int, weights: Weights, length: int) -> None:
        super().__init__()
        self.decode = Decode(weights, length)
        self.turns = nn.ModuleList(Turn(choice, weights) for _ in range(num_steps))
        self.tables = CHOOSERS[choice].tables
        self.state = ("kv_cache", *self.tables, "last_sampled")
        written = {"kv_cache", "token_counts", "last_sampled"}
        self.mutates = tuple(name for name in self.state if name in written)

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        """What a `WindowOutput` has, one behind the other; log-probabilities if any."""
        slots, known = tensors["slots"].long(), tensors["input_ids"]
        last, stops = tensors["last_sampled"], tensors["stop_token_ids"]
        ids = torch.where(known < 0, last[slots], known).long()
        # A row whose token stops it has stopped in the window before.
        goes_on = (tensors["limits"] > 0) & (ids[:, None] != stops).all(1)
        at = torch.where(goes_on, tensors["positions"].long(), 0)
        where = torch.where(goes_on, slots, 0)
        count = torch.zeros_like(ids)
        tables = {name: tensors[name] for name in self.tables}
        found = []
        for turn in self.turns:
            hidden = self.decode.hidden(ids, at, where, tensors["kv_cache"])
            rest = count, tensors["limits"], stops, tables
            given, ids, at, where, count, *logprobs = turn(hidden, ids, at, where, *rest)
            found.append((given, *logprobs))
        last_tokens = ids.to(torch.int32)
        last.index_put_((slots,), last_tokens)
        given, *logprobs = (torch.stack(parts) for parts in zip(*found, strict=True))
        return given, last_tokens, *logprobs
