"""The policy under which a step stays asynchronous when the batch changes.

Each row of a decode step is gathered on the device from the last token sampled for its slot,
whichever step that was, or comes from the host where the host knows it. Join, finish and reorder
are then other indices and no more: nothing is read back on the critical path.

Source: docs/async-decode.md, "The gather policy".
"""

from __future__ import annotations

from typing import Any, cast

import torch

from neuron_streams.decode.batch import PLACEHOLDER, ModelInput
from neuron_streams.decode.model import FROM_DEVICE, GatherModel, Model, Sampled
from neuron_streams.decode.output import Streams
from neuron_streams.decode.runner import ModelRunner
from neuron_streams.decode.schedule import SchedulerOutput
from neuron_streams.errors import UnsupportedError

__all__ = ["GatherRunner"]

# What the host does not know is what the gather takes from the device.
assert PLACEHOLDER == FROM_DEVICE


class GatherRunner(ModelRunner):
    """A `ModelRunner` that never breaks the async flow; its model is a `GatherModel`.

    Every launched step, prefill included, counts as async.

    Raises:
        UnsupportedError: The model has no `decode_gather`.
    """

    def __init__(self, model: Model, streams: Streams, **options: Any) -> None:
        if getattr(model, "decode_gather", None) is None:
            raise UnsupportedError(
                f'policy="gather": {type(model).__name__} has no decode_gather, so it cannot take'
                ' a row\'s last token from the device; pass policy="materialize", or give the'
                " model what decode.GatherModel asks for."
            )
        super().__init__(model, streams, **options)

    def _decode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Sampled:
        return cast("GatherModel", self.model).decode_gather(input_ids, positions, slots)

    def _check_batch_composition(self, scheduler_output: SchedulerOutput) -> None:
        if not scheduler_output.num_scheduled_tokens:
            self._materialize_pending_async_output("nothing to run")

    def _swap_in_future(
        self, scheduler_output: SchedulerOutput, model_input: ModelInput
    ) -> tuple[ModelInput, str | None]:
        self._check_rows()
        return model_input, None

    def _check_rows(self) -> None:
        batch = self.input_batch
        for state, token_ids in zip(batch.states, batch.token_ids_cpu, strict=False):
            at = state.num_computed_tokens
            if state.ended or not state.is_decode or token_ids[at] != FROM_DEVICE:
                continue
            if state.sampled_position != at:
                raise RuntimeError(
                    f"{state.key} decodes at position {at}, but the last token sampled for it is"
                    f" that of {state.sampled_position}, and the host does not know the other: the"
                    " schedule skipped a step."
                )
