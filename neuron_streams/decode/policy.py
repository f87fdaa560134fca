"""The policy of a step: which rows it computes, how many tokens of each, and why.

**Prompts and decode rows.** A model that has `packed` computes both in one step: each step carries
every row that decodes, and prompts in what room is left, so that nobody stands still. Other models
prefill or decode. Without a bound they prefill first, since a full batch decodes best. With one a
decode step follows each prefill step while any row decodes.

**The bound.** `max_num_batched_tokens` bounds the tokens of a step while any row decodes: it is
what a running request waits between two of its tokens. A model that goes on with prompts has longer
ones cut to it; one that cannot takes a prompt whole. Where no row decodes nobody waits, and prompts
are computed in the largest pieces that the model takes.

**Padding.** A model that packs computes as many tokens as the smallest of its prompt buckets that
holds them. Where prompts would leave more than half of it empty, the step takes as many as fill the
bucket below, and the next step goes on with the rest.

**Order of prompts.** With a bound the one with the fewest tokens left goes first within a priority,
which is what makes the mean time to a first token least. A long prompt would starve under a stream
of short ones, so `MOST_OVERTAKEN` steps may compute later prompts before it, and then it goes first
among all that came later. A step takes prompts from the front of this order and skips none, so that
bound is exact. Without a bound prompts go in order of arrival.

**Windows.** A launch runs `steps_per_launch` decode steps where nobody waits to join, and one
otherwise. A request that arrives meanwhile waits for the windows in flight, which are at most
`depth * steps_per_launch` decode steps; aborts and pauses take effect there as well.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from typing import NamedTuple

from neuron_streams.decode.capacity import Capacity
from neuron_streams.decode.model import Model, goes_on_with_prompts
from neuron_streams.decode.request import Request
from neuron_streams.errors import UnsupportedError

__all__ = ["MOST_OVERTAKEN", "Choice", "StepPolicy"]

MOST_OVERTAKEN = 8
"""Steps that may compute prompts of the same priority which came later, and none of a prompt."""


class Choice(NamedTuple):
    """What a step computes: so many tokens of each request, or that many decode steps at once."""

    num_tokens: dict[Request, int]
    num_steps: int = 1


class StepPolicy:
    """Chooses among the rows; see above.

    Args:
        model: Its sizes, and what it offers.
        max_batch_size: Most rows of a step.
        max_num_batched_tokens: Most tokens of a step while any row decodes; None for no bound.
        steps_per_launch: Most decode steps of a launch.

    Raises:
        ValueError: A bound below `max_batch_size`, which would leave prompts no room, or windows of
            a size that the model does not take.
        UnsupportedError: Windows, and the model has none.
    """

    def __init__(
        self,
        model: Model,
        max_batch_size: int,
        max_num_batched_tokens: int | None = None,
        steps_per_launch: int = 1,
    ) -> None:
        if max_num_batched_tokens is not None and max_num_batched_tokens < max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}; it must be at least"
                f" max_batch_size, which is {max_batch_size}: each row that decodes takes a token"
                " of the step, and prompts need room beside them."
            )
        self.steps_per_launch = steps_per_launch
        self._windows = _windows(model, steps_per_launch)
        self._max_batch_size = max_batch_size
        self._bound = max_num_batched_tokens
        self._buckets = model.prompt_buckets
        self._most_prompts = model.prefill_batch
        self._mixes = hasattr(model, "packed")
        self._block = getattr(model, "token_block", 1)
        self._cuts = goes_on_with_prompts(model)
        self._decode_is_due = False

    def most_to_admit(self, rows: Collection[Request]) -> int:
        """How many new prompts may be given rows now.

        With a bound as many as there is room for, since the shortest goes first; else what one step
        takes, once those before are computed.
        """
        if self._bound is not None:
            return self._max_batch_size
        return 0 if any(request.is_prefilling for request in rows) else self._most_prompts

    def choose(self, capacity: Capacity) -> Choice:
        """The next step; an empty one where there are no rows."""
        prompts = [request for request in capacity.rows if request.is_prefilling]
        decoding = [request for request in capacity.rows if not request.is_prefilling]
        if not prompts or (decoding and self._decode_is_due):
            self._decode_is_due = False
            if prompts or capacity.somebody_waits:
                return Choice(dict.fromkeys(decoding, 1))
            return self._window_of(decoding)
        bound = self._bound if decoding else None
        beside = decoding if self._mixes else []
        largest = self._buckets[-1]
        room = largest if bound is None else min(largest, bound - len(beside))
        chosen = self._fill_bucket(self._in_order(prompts), room)
        self._count_overtaken(prompts, chosen)
        self._decode_is_due = bound is not None and not self._mixes
        return Choice(dict.fromkeys(beside, 1) | chosen)

    def _window_of(self, decoding: list[Request]) -> Choice:
        """The largest window that some row can fill: a step that no row needs is time lost."""
        most = max((request.num_tokens_to_come for request in decoding), default=0)
        num_steps = max((size for size in self._windows if size <= most), default=1)
        counts = {request: min(num_steps, request.num_tokens_to_come) for request in decoding}
        return Choice(counts, num_steps)

    def _in_order(self, prompts: list[Request]) -> list[Request]:
        if self._bound is None:
            return sorted(prompts, key=lambda request: request.order)
        return sorted(prompts, key=_shortest_first)

    def _fill_bucket(self, prompts: list[Request], room: int) -> dict[Request, int]:
        """As `_fill`, in the largest bucket that is at least half full."""
        chosen = self._fill(prompts, room, self._buckets[-1])
        if not self._mixes:
            return chosen
        taken = sum(self._padded(count) for count in chosen.values())
        fits = bisect.bisect_left(self._buckets, taken)
        if fits in (0, len(self._buckets)) or 2 * taken >= self._buckets[fits]:
            return chosen
        return self._fill(prompts, room, self._buckets[fits - 1])

    def _padded(self, count: int) -> int:
        """Tokens in whole blocks."""
        return -(-count // self._block) * self._block

    def _fill(self, prompts: list[Request], room: int, bucket: int) -> dict[Request, int]:
        """Tokens of as many as fit, from the front; the first always fits."""
        chosen: dict[Request, int] = {}
        space = bucket - bucket % self._block
        for request in prompts[: self._most_prompts]:
            count = self._num_tokens(request, min(room, space))
            if chosen and (count > room or count > space or self._differs(request, chosen)):
                break
            chosen[request] = count
            if self._mixes or self._bound is not None:
                room -= count
            if self._mixes:
                space -= self._padded(count)
            if min(room, space) < 1:
                break
        return chosen

    def _num_tokens(self, request: Request, room: int) -> int:
        left = request.num_tokens_left
        if self._cuts:
            return min(left, room)
        # What a model cannot go on with is decoded token by token, though it is known.
        return 1 if request.num_computed_tokens else min(left, self._buckets[-1])

    def _differs(self, request: Request, chosen: dict[Request, int]) -> bool:
        """Whether it may not share a prefill step with the others: some start, some go on."""
        first = next(iter(chosen))
        starts = bool(request.num_computed_tokens) == bool(first.num_computed_tokens)
        return not self._mixes and not starts

    def _count_overtaken(self, prompts: list[Request], chosen: Collection[Request]) -> None:
        for request in prompts:
            if request not in chosen:
                request.num_overtaken += any(
                    other.priority == request.priority and other.arrival > request.arrival
                    for other in chosen
                )


def _shortest_first(request: Request) -> tuple[float, bool, int, int]:
    overtakes = request.num_overtaken < MOST_OVERTAKEN
    length = request.num_tokens_left if overtakes else 0
    return request.priority, overtakes, length, request.arrival


def _windows(model: Model, steps_per_launch: int) -> tuple[int, ...]:
    """The window sizes that may be used."""
    if steps_per_launch < 1:
        raise ValueError(f"steps_per_launch is {steps_per_launch}; it must be 1 or more.")
    if steps_per_launch == 1:
        return ()
    sizes: tuple[int, ...] | None = getattr(model, "window_sizes", None)
    if sizes is None:
        raise UnsupportedError(
            f"steps_per_launch={steps_per_launch}: {type(model).__name__} has no decode_window, so"
            " a launch runs one decode step; pass 1, or give the model what decode.WindowModel asks"
            " for."
        )
    if steps_per_launch not in sizes:
        raise ValueError(
            f"steps_per_launch is {steps_per_launch}; this model runs windows of"
            f" {', '.join(map(str, sizes))} decode steps. Choose one of them, or 1."
        )
    return tuple(size for size in sizes if size <= steps_per_launch)
