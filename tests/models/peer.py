"""The same weights in transformers: what the models are compared with."""

from __future__ import annotations

from typing import Any

import torch

from models.layers import Weights
from models.loader import _destinations
from models.sampling import uniform
from tests.models.driver import Request, ints


def in_transformers(weights: Weights) -> Any:
    """A `LlamaForCausalLM` of the same configuration and the same parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = weights.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {name: getattr(scaling, name) for name in scaling.__slots__}
        rope["rope_type"] = "llama3"
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    lacking = made.load_state_dict(checkpoint(weights), strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}
    assert not lacking.unexpected_keys
    return made.eval()


def checkpoint(weights: Weights) -> dict[str, torch.Tensor]:
    """The parameters under the names of a Hugging Face checkpoint."""
    return {name: part.detach().clone() for name, part in _destinations(weights).items()}


@torch.inference_mode()
def greedy_tokens(peer: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens by the whole sequence, anew for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(peer(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def tokens_of(peer: Any, request: Request, count: int) -> list[int]:
    """`count` tokens of a request that may sample and have wishes, drawn with our uniforms."""
    done = Request(request.prompt, request.slot, wishes=request.wishes)
    min_p = (request.wishes or {}).get("min_p", 0.0)
    for _ in range(count):
        ids = [*done.prompt, *done.tokens]
        scores = processed(peer(torch.tensor([ids])).logits[0, -1], done)
        if request.temperature == 0:
            done.tokens.append(int(scores.argmax()))
            continue
        parameters = request.temperature, request.top_k, request.top_p, min_p
        odds = warped(scores[None], *parameters)[0].cumsum(-1)
        draw = uniform(torch.tensor([request.seed]), ints([len(ids)]))
        done.tokens.append(int((odds <= draw * odds[-1]).sum()))
    return done.tokens


def processed(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The request's logits, [vocab], after its prompt and its tokens."""
    from transformers.generation.logits_process import (
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    wishes: dict[str, Any] = request.wishes or {}
    ids = torch.tensor([[*request.prompt, *request.tokens]])
    scores, length = logits[None], len(request.prompt)
    if bias := wishes.get("logit_bias"):
        scores = SequenceBiasLogitsProcessor({(t,): float(b) for t, b in bias.items()})(ids, scores)
    if "stop_mask" in wishes:
        new = wishes.get("min_length", 0) - length
        stop = sorted(wishes["stop_mask"])
        scores = MinNewTokensLengthLogitsProcessor(length, max(new, 0), stop, "cpu")(ids, scores)
    if penalty := wishes.get("repetition_penalty"):
        scores = RepetitionPenaltyLogitsProcessor(float(penalty))(ids, scores)
    # transformers has no others; these are the words of OpenAI's reference.
    for token in request.tokens:
        scores[0, token] -= wishes.get("frequency_penalty", 0.0)
    for token in set(request.tokens):
        scores[0, token] -= wishes.get("presence_penalty", 0.0)
    return scores[0]


def warped(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The distribution by the classes that `transformers.generate` uses, in its order."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    wanted: list[Any] = [TemperatureLogitsWarper(temperature)]
    wanted += [TopKLogitsWarper(top_k)] if top_k else []
    wanted += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    wanted += [MinPLogitsWarper(min_p)] if min_p else []
    ids = torch.zeros(logits.shape[0], 0, dtype=torch.long)
    return torch.softmax(LogitsProcessorList(wanted)(ids, logits.clone()), -1)
