"""What the decode loop asks of a model: three calls that submit and return, and its sizes."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import torch

__all__ = [
    "FROM_DEVICE",
    "MAX_LOGPROBS",
    "MAX_STOP_IDS",
    "NO_TOKEN",
    "Adjustments",
    "ChunkModel",
    "GatherModel",
    "LogprobsTensors",
    "Model",
    "PackedModel",
    "Sampled",
    "SamplerOutput",
    "SamplingTensors",
    "Window",
    "WindowModel",
    "WindowOutput",
    "goes_on_with_prompts",
]

FROM_DEVICE = -1
"""In the ids of `decode_gather`: the token that the device sampled last for the row's slot."""

MAX_LOGPROBS = 20
"""Most alternatives of a token whose log-probabilities a request may ask for."""


MAX_STOP_IDS = 16
"""Most tokens of a row that end it on the device, in the middle of a window."""

NO_TOKEN = -1
"""In what a window gives: the row had stopped before."""


class Adjustments(NamedTuple):
    """What few requests ask for, of n prefill rows: host tensors, neutral where a row does not.

    The history of a row is what the device has seen of it: the tokens whose keys and values its
    slot holds, the one that the step brings included. Those at positions below
    `num_prompt_tokens` are its prompt, the others its output. In this order, on the model's
    logits: `logit_bias` is added; below position `min_length` the tokens of `stop_mask` are
    excluded; `repetition_penalty` divides positive logits of tokens in the history and multiplies
    negative ones; `frequency_penalty` is subtracted once for each time that a token is in the
    output, `presence_penalty` once if it is. After temperature, top-k and top-p, tokens less likely
    than `min_p` times the likeliest are excluded.

    Attributes:
        min_p, repetition_penalty, presence_penalty, frequency_penalty: float32 [n]; 0, 1, 0 and 0
            are neutral.
        num_prompt_tokens: int32 [n].
        min_length: int32 [n], the first position at which a token of `stop_mask` may be sampled.
        num_logprobs: int32 [n], how many alternatives are wanted; -1 for no log-probabilities.
        logit_bias: float32 [n, vocab].
        stop_mask: bool [n, vocab].
    """

    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    num_prompt_tokens: torch.Tensor
    min_length: torch.Tensor
    num_logprobs: torch.Tensor
    logit_bias: torch.Tensor
    stop_mask: torch.Tensor


class SamplingTensors(NamedTuple):
    """Sampling parameters of n prefill rows, host tensors of shape [n].

    `temperature` float32 (0 is greedy), `top_k` int32 (0 is off), `top_p` float32 (1.0 is off),
    `seed` int64. `adjustments` is None where no row asks for any.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    adjustments: Adjustments | None = None


class LogprobsTensors(NamedTuple):
    """Log-probabilities of B sampled tokens, futures; of the model's own logits, unadjusted.

    Column 0 is the sampled token, the others the `MAX_LOGPROBS` likeliest, best first.

    Attributes:
        logprob_token_ids: int32 [B, 1 + MAX_LOGPROBS].
        logprobs: float32 [B, 1 + MAX_LOGPROBS].
        selected_token_ranks: int32 [B], 1 where the sampled token is the likeliest.
    """

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class SamplerOutput(NamedTuple):
    """What a step gives where the slot of a row wants log-probabilities."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors


class WindowOutput(NamedTuple):
    """What a window of k decode steps gives, futures.

    Attributes:
        sampled_token_ids: int32 [k, B]; `NO_TOKEN` where a row has stopped before.
        last_token_ids: int32 [B], the last token of each row.
        logprobs_tensors: As of a step, with a first dimension of k; None where no row wants any.
    """

    sampled_token_ids: torch.Tensor
    last_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None = None


Sampled: TypeAlias = torch.Tensor | SamplerOutput | WindowOutput
"""int32 [B] sampled token ids, a future; with their log-probabilities where a row wants them.
That of a window is a `WindowOutput`."""


class Window(NamedTuple):
    """When the rows of a window stop, host tensors.

    Attributes:
        limits: int32 [B], most tokens of each row; 0 for padding rows.
        stop_token_ids: int32 [B, MAX_STOP_IDS], padded with `NO_TOKEN`.
        num_steps: Of the window.
    """

    limits: torch.Tensor
    stop_token_ids: torch.Tensor
    num_steps: int


class Model(Protocol):
    """A decoder with static shapes that owns its KV cache and samples on the device.

    The calls submit to the current stream and return at once with device tensors that are
    futures. The token sampled at position p depends on the request's seed, p and its history only:
    never on the batch, the row, the slot or the schedule.

    A model that honours `Adjustments` has `adjusts_logits = True`; without it the scheduler refuses
    requests that ask for any. One that cannot honour every `SamplingParams` also has
    `check_sampling(params)`, which the scheduler calls at admission and which raises ValueError: a
    refusal later, in `prefill`, fails its whole step. `GatherModel`, `ChunkModel`,
    `PackedModel` and `WindowModel` are what a model may offer beyond this.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def max_length(self) -> int:
        """Tokens, prompt and output together, that a slot can hold."""

    @property
    def num_slots(self) -> int:
        """Slots of the KV cache; slot 0 is scratch, requests use 1 to num_slots - 1."""

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Row counts that `decode` takes, ascending."""

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Prompt lengths that `prefill` takes, ascending."""

    @property
    def prefill_batch(self) -> int:
        """Most rows of one prefill step."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def on_device_sampling(self) -> bool:
        """Whether the calls return sampled tokens; the asynchronous loop needs it."""

    def prefill(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Sampled:
        """Fill the slots with prompts and sample the token that follows each.

        Args:
            input_ids: int32 [n, P], P a prompt bucket, rows padded with 0 on the right.
            lengths: int32 [n], the real length of each row, at least 1.
            slots: int32 [n].
            sampling: The rows' parameters, kept by the model for the slots' later steps.

        Returns:
            int32 [n], a future: the token at position `lengths[i]` of each row. `SamplerOutput`
            where a row asks for log-probabilities, whether or not its prompt ends here.
        """

    def decode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Sampled:
        """Append one token to each row's slot and sample the next.

        Args:
            input_ids: int32 [B], B a batch bucket: the token at `positions[i]`. The previous
                step's future, or a host tensor.
            positions: int32 [B].
            slots: int32 [B]. Padding rows have slot 0, position 0 and id 0.

        Returns:
            int32 [B], a future. `SamplerOutput` where a row's slot wants log-probabilities.
        """

    def remap(self, future: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Gather rows into a new tensor: row i of the result is row `index[i]` of the future.

        Args:
            future: int32 [B], a device tensor.
            index: int32 [B], a host tensor.
        """


class GatherModel(Model, Protocol):
    """A model that keeps `last_sampled`, int32 [num_slots], on the device.

    Every step, `prefill` included, scatters its sampled tokens into it by slot, and
    `decode_gather` gathers its input from it: so a row may come from any earlier step, whatever
    has joined, left or moved since. `policy="gather"` needs this.
    """

    def decode_gather(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Sampled:
        """As `decode`, all in one executable with the gather.

        Args:
            input_ids: int32 [B], a host tensor: the token at `positions[i]` where the host knows
                it, `FROM_DEVICE` where it is `last_sampled[slots[i]]`.
            positions: int32 [B].
            slots: int32 [B]. Padding rows have slot 0, position 0 and id 0.
        """


class ChunkModel(Model, Protocol):
    """A model that can go on with a prompt where an earlier step has ended.

    Prompts may then be longer than the largest prompt bucket. Without it the scheduler refuses
    them, and has tokens that are too many for one bucket after a preemption decoded one by one.
    """

    def prefill_chunk(
        self,
        input_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Sampled:
        """As `prefill`, on slots that already hold `starts[i]` tokens, at least 1.

        Args:
            input_ids: int32 [n, P]: the tokens at `starts[i]` and after, padded with 0. Padding may
                reach beyond `max_length`; it must touch nothing but the scratch slot.
            starts: int32 [n].
            lengths: int32 [n], the real length of each row of `input_ids`, at least 1.
            slots: int32 [n].
            sampling: As for `prefill`.

        Returns:
            int32 [n], a future: the token at position `starts[i] + lengths[i]` of each row.
        """


class PackedModel(Model, Protocol):
    """A model that computes any mix of prompts, pieces of them and decode rows in one step.

    The rows lie behind one another on one token axis. With it the loop prefills by `packed` alone:
    `prompt_buckets` are then the token counts of a step, and `prefill_batch` prompts and as many
    decode rows as the largest batch bucket has left share one.
    """

    @property
    def token_block(self) -> int:
        """What the model rounds the tokens of each prompt up to before they are put together."""

    def packed(
        self,
        input_ids: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sampling: SamplingTensors,
    ) -> Sampled:
        """Append tokens to each row's slot and sample the one that follows them.

        Args:
            input_ids: int32 [sum(lengths)], a host tensor: the rows, one behind the other, without
                padding. Rounded up to `token_block` the prompts of more than one token fit the
                largest prompt bucket. In the one token of a decode row, `FROM_DEVICE` is
                `last_sampled[slots[i]]` where the model is a `GatherModel`.
            starts: int32 [n]: so many tokens the slots hold already.
            lengths: int32 [n], at least 1.
            slots: int32 [n]. A row of slot 0 is padding.
            sampling: The rows' parameters, kept for the slots' later steps; what a row that decodes
                has given before is given again.

        Returns:
            int32 [n] or more, a future: the token at position `starts[i] + lengths[i]` of each row.
        """


class WindowModel(Model, Protocol):
    """A model that runs several decode steps in one call, and feeds itself the tokens."""

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """Numbers of decode steps that `decode_window` takes, ascending, each above 1."""

    def decode_window(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        window: Window,
    ) -> WindowOutput:
        """As so many calls of `decode`, each on the tokens of the one before.

        A row stops behind a token that is among its stop tokens, or at its limit. It takes no part
        where its input already is one of them: it has stopped in the window before. A row that has
        stopped writes nothing: its slot is the scratch slot from then on.

        Args:
            input_ids: int32 [B], as of `decode`, or of `decode_gather` where the model is a
                `GatherModel`.
            positions: int32 [B].
            slots: int32 [B].
            window: When the rows stop, and the number of steps.
        """


def goes_on_with_prompts(model: Model) -> bool:
    """Whether prompts may be computed in pieces."""
    return hasattr(model, "prefill_chunk") or hasattr(model, "packed")
