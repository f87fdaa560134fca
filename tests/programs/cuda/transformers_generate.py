"""Generation with every kind of cache that moves over streams, and continuous batching."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=96,
)
model = LlamaForCausalLM(config).eval().to("cuda")
assert model.device.type == torch.device("cuda").type
prompt = torch.tensor([[0, 0, 5, 7, 11], [3, 1, 4, 15, 9]], device="cuda")
mask = (prompt != 0).long()


def generate(**options):
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=12, **options)
    return out.tolist()


with torch.no_grad():
    print("logits", model(prompt, attention_mask=mask).logits[:, -1].cpu().tolist()[0][:8])
print("greedy", generate(do_sample=False))
print("beams", generate(do_sample=False, num_beams=3))
print("penalties", generate(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2))
print("static", generate(do_sample=False, cache_implementation="static", disable_compile=True))
print("offloaded", generate(do_sample=False, cache_implementation="offloaded"))
print(
    "offloaded_static",
    generate(do_sample=False, cache_implementation="offloaded_static", disable_compile=True),
)
sampled = model.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=True, top_k=5)
print("sampled", sampled.shape[0], bool((sampled[:, :5] == prompt).all()))

pipe = model.generate(
    prompt[:1],
    attention_mask=mask[:1],
    max_new_tokens=4,
    output_scores=True,
    return_dict_in_generate=True,
    do_sample=False,
)
print("scores", [score.max().item().hex() for score in pipe.scores])
