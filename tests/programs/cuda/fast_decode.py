"""A decode loop in the manner of gpt-fast: a static cache, a position that stays on the device, and
a sampler that never waits for it."""

import torch
import torch.nn.functional as F
from torch import nn

DIM, HEADS, VOCAB, SEQ, LAYERS = 32, 4, 67, 48, 2
device = "cuda"


class KVCache(nn.Module):
    def __init__(self):
        super().__init__()
        shape = (1, HEADS, SEQ, DIM // HEADS)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos, k, v):
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        return self.k_cache, self.v_cache


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w2 = nn.Linear(DIM, 64, bias=False), nn.Linear(64, DIM, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.cache = KVCache()

    def forward(self, x, mask, input_pos):
        parts = self.wqkv(self.norm1(x)).split(DIM, dim=-1)
        q, k, v = (p.view(1, -1, HEADS, DIM // HEADS).transpose(1, 2) for p in parts)
        k, v = self.cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.wo(y.transpose(1, 2).reshape(1, -1, DIM))
        return x + self.w2(F.silu(self.w1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("causal_mask", torch.tril(torch.ones(SEQ, SEQ, dtype=torch.bool)))

    def forward(self, idx, input_pos):
        mask = self.causal_mask[None, None, input_pos]
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, mask, input_pos)
        return self.output(x)


def multinomial_sample_one_no_sync(probs):
    q = torch.empty_like(probs).exponential_(1)
    return torch.argmax(probs / q, dim=-1, keepdim=True).to(dtype=torch.int)


def sample(logits, temperature=1.0, top_k=None):
    logits = logits[0, -1] / max(temperature, 1e-5)
    if top_k is not None:
        v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
        pivot = v.select(-1, -1).unsqueeze(-1)
        logits = torch.where(logits < pivot, -float("Inf"), logits)
    return multinomial_sample_one_no_sync(torch.nn.functional.softmax(logits, dim=-1))


@torch.no_grad()
def generate(model, prompt, max_new_tokens, top_k):
    T = prompt.size(0)
    seq = torch.empty(T + max_new_tokens, dtype=prompt.dtype, device=device)
    seq[:T] = prompt
    input_pos = torch.arange(0, T, device=device)
    next_token = sample(model(prompt.view(1, -1), input_pos), top_k=top_k).clone()
    seq[T] = next_token
    input_pos = torch.tensor([T], device=device, dtype=torch.int)
    cur_token, new_tokens = next_token.view(1, -1), []
    for _ in range(max_new_tokens - 1):
        next_token = sample(model(cur_token, input_pos), top_k=top_k)
        input_pos += 1
        new_tokens.append(next_token.clone())
        cur_token = next_token.clone().view(1, -1)
    seq[T + 1 :] = torch.cat(new_tokens)
    return seq


torch.manual_seed(0)
model = Transformer().eval().to(device=device, dtype=torch.float32)
for dtype in (torch.float32, torch.bfloat16):
    model = model.to(dtype=dtype)
    prompt = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int, device=device)
    torch.cuda.synchronize()
    print(dtype, generate(model, prompt, 24, top_k=1).tolist())
    free = generate(model, prompt, 24, top_k=8)
    print(free.shape, bool((free >= 0).all() and (free < VOCAB).all()))
