"""`DecodeLoop.generate`: prompts in, an iterator over their outputs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from neuron_streams.decode import coerce
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neuron_streams.decode.loop import DecodeLoop

__all__ = ["generate"]


def generate(
    loop: DecodeLoop,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    request_ids: Sequence[str] | None,
) -> Iterator[RequestOutput]:
    """See `DecodeLoop.generate`."""
    prompts = coerce.items("prompts", prompts)
    ids = [str(n) for n in range(len(prompts))]
    if request_ids is not None:
        ids = [coerce.text("request_id", one) for one in coerce.items("request_ids", request_ids)]
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: list[SamplingParams | None] = [sampling_params] * len(prompts)
    else:
        params = coerce.items("sampling_params", sampling_params)
    if not len(ids) == len(params) == len(prompts):
        raise ValueError(
            f"generate got {len(prompts)} prompts, {len(params)} sampling_params and"
            f" {len(ids)} request_ids; give one of each for every prompt."
        )
    for n, (request_id, prompt, each) in enumerate(zip(ids, prompts, params, strict=True)):
        try:
            loop.add_request(request_id, prompt, each)
        except Exception:
            for added in ids[:n]:
                loop.scheduler.abort_request(added)
            raise
    return _outputs_of(loop, set(ids))


def _outputs_of(loop: DecodeLoop, ids: set[str]) -> Iterator[RequestOutput]:
    going: str | None = None
    try:
        while ids:
            going = _one_that_goes_on(loop, ids, going)
            left = (output.request_id for output in loop._outbox.outputs)
            if going is None and ids.isdisjoint(left):
                break
            outputs = loop.step()
            # Another iterator's, or the caller's own: left for their next step.
            loop._outbox.outputs += [out for out in outputs if out.request_id not in ids]
            for output in outputs:
                if output.request_id in ids:
                    if output.finished:
                        ids.discard(output.request_id)
                    yield output
        ids = set()  # what is left is paused, and not ours to abort
        if not loop.scheduler.unfinished_request_ids:
            loop._outbox.outputs = loop.drain()
    finally:
        for request_id in ids:
            loop.scheduler.abort_request(request_id)


def _one_that_goes_on(loop: DecodeLoop, ids: set[str], last: str | None) -> str | None:
    """A request that may give more, if any does; as a rule the `last` one, without a search."""
    may_give = loop.scheduler.may_give_output
    if last is not None and last in ids and may_give(last):
        return last
    return next(filter(may_give, ids), None)
