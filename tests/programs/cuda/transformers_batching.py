"""transformers' continuous batching."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

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
    attn_implementation="sdpa",
)
model = LlamaForCausalLM(config).eval().to("cuda")
prompts = [[5, 7, 11], [3, 1, 4, 15, 9, 2, 6], [8], [2, 7, 18, 28], [31, 41, 59]]
outputs = model.generate_batch(
    prompts,
    generation_config=GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=96),
    continuous_batching_config=ContinuousBatchingConfig(
        block_size=16, num_blocks=32, max_batch_tokens=16
    ),
)
for prompt in prompts:
    found = [o.generated_tokens for o in outputs.values() if list(o.prompt_ids) == prompt]
    print(prompt, found)
