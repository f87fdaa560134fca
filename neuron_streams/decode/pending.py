"""What is pending between the steps of a runner: the future that bridges two of them, and outputs
that have not been written back to the batch state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypedDict

import torch

from neuron_streams.decode.output import AsyncModelRunnerOutput
from neuron_streams.decode.request import RequestKey
from neuron_streams.decode.sampled import ModelRunnerOutput
from neuron_streams.decode.stats import DecodeStats

__all__ = ["AsyncExecutionBuffer", "PendingOutputs"]


class AsyncExecutionBuffer(TypedDict, total=False):
    """The bridge between consecutive steps; `async_output` is read only to break the flow."""

    futures_sampled_token_ids: torch.Tensor
    prev_req_ids_ordered: list[RequestKey]
    async_output: AsyncModelRunnerOutput


class PendingOutputs(deque[AsyncModelRunnerOutput]):
    """Outputs in launch order, until the thread that drives the runner has written them back.

    Args:
        most: Outputs that may be pending before a further step waits.
        is_output_rank: Whether somebody else reads the outputs and is told of failures.
        stats: Where waiting is counted.
        before_read: Called before an output is waited for.
    """

    def __init__(
        self,
        most: int,
        is_output_rank: bool,
        stats: DecodeStats,
        before_read: Callable[[AsyncModelRunnerOutput], None] | None,
    ) -> None:
        super().__init__()
        self._most = most
        self._is_output_rank = is_output_rank
        self._stats = stats
        self._before_read = before_read

    def retire_done(self) -> Iterator[ModelRunnerOutput]:
        """Take out what others have read, and what must go because too much is pending."""
        while self and self._may_retire(self[0]):
            yield self._value_of(self[0], lambda output: output.retire())
            self.popleft()

    def retire_all(self) -> Iterator[ModelRunnerOutput]:
        """Take everything out. Host: blocks until the newest step's tokens are read."""
        while self:
            yield self._value_of(self[0], lambda output: output.get_output())
            self.popleft()

    def _may_retire(self, output: AsyncModelRunnerOutput) -> bool:
        if output.done or len(self) >= self._most:
            return True
        return not self._is_output_rank and output.ready()

    def _value_of(
        self,
        oldest: AsyncModelRunnerOutput,
        read: Callable[[AsyncModelRunnerOutput], ModelRunnerOutput],
    ) -> ModelRunnerOutput:
        try:
            with self._stats.waiting():
                if self._before_read is not None and not oldest.done:
                    self._before_read(oldest)
                return read(oldest)
        except Exception as error:
            # On the output rank whoever is handed the output is told. Elsewhere nobody else is.
            if error is not oldest.error or not self._is_output_rank:
                raise
            return ModelRunnerOutput.of_failure(oldest.req_ids, oldest.error)
