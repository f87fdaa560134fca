import torch

from models import toy
from models.state import empty_state


def test_sizes_and_types():
    state = empty_state(toy.CONFIG, torch.bfloat16, num_slots=3, max_length=20)
    assert state["kv_cache"].shape == (2, 2, 3, 2, 20, 8)
    assert state["kv_cache"].dtype == torch.bfloat16
    del state["kv_cache"]
    assert {name: made.dtype for name, made in state.items()} == {
        "temperatures": torch.float32,
        "top_ks": torch.int32,
        "top_ps": torch.float32,
        "seeds": torch.int64,
        "last_sampled": torch.int32,
    }
    assert all(made.shape == (3,) and not made.any() for made in state.values())
