"""`DecodeLoop.generate`: prompts in, an iterator over their outputs out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from neuron_streams.decode import coerce
from neuron_streams.decode.request import RequestOutput
from neuron_streams.decode.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neuron_streams.decode.loop import DecodeLoop

__all__ = ["Generated", "generate"]


def generate(
    loop: DecodeLoop,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    request_ids: Sequence[str] | None,
) -> Generated:
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
    others = set(loop.scheduler.unfinished_request_ids).intersection(ids)
    try:
        for request_id, prompt, each in zip(ids, prompts, params, strict=True):
            loop.add_request(request_id, prompt, each)
        return Generated(loop, set(ids))
    except BaseException:
        loop._abort_silently(set(ids) - others)
        raise


class Generated(Iterator[RequestOutput]):
    """The outputs of some requests of a loop, which the iterator steps.

    Not a generator, since an interrupt would end that. An output stays in the loop's outbox until
    the call that returns it: others' outputs, and what an interrupted call has not returned.
    """

    def __init__(self, loop: DecodeLoop, request_ids: set[str]) -> None:
        self._loop = loop
        self._request_ids = request_ids
        self._begun = False
        self._going: str | None = None
        self._given: RequestOutput | None = None

    def __next__(self) -> RequestOutput:
        loop, mine = self._loop, self._request_ids
        if not self._begun:
            loop._generating.append((weakref.ref(self), mine))
            self._begun = True
        self._note_given()
        while mine:
            loop._begin("generate")
            for place, output in enumerate(loop._outbox.outputs):
                if output.request_id in mine:
                    self._given = output
                    del loop._outbox.outputs[place]
                    return output
            if not self._may_come():
                mine.clear()  # what is left is paused, and not ours to abort
                break
            loop._advance()
        if not loop.scheduler.unfinished_request_ids:
            loop._flush()
        raise StopIteration

    def _may_come(self) -> bool:
        """Whether steps may bring more of what is its own; as a rule asked of one request alone."""
        may_give = self._loop.scheduler.may_give_output
        going = self._going
        if going is None or going not in self._request_ids or not may_give(going):
            self._going = next(filter(may_give, self._request_ids), None)
        return self._going is not None

    def close(self) -> None:
        """Abort what has not finished."""
        self._loop._life.process.check()
        self._note_given()
        if self._begun:
            self._loop._abort_silently(self._request_ids)
        self._request_ids.clear()

    def _note_given(self) -> None:
        given = self._given
        if given is None or not given.finished:
            return
        if all(output is not given for output in self._loop._outbox.outputs):
            self._request_ids.discard(given.request_id)
            self._given = None
