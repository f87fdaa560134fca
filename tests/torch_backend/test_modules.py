"""Modules move to the device and stay themselves: parameters, tied weights, optimizers, hooks."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.torch_backend.device import DEVICE, is_here

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids):
        return self.head(self.embed(ids) * self.scale)


def test_parameters_keep_their_identity():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = list(model.parameters())
    assert model.to(DEVICE) is model
    after = list(model.parameters())
    assert [id(p) for p in before] == [id(p) for p in after]
    assert all(is_here(p) and type(p) is nn.Parameter and p.is_leaf for p in after)
    assert all(is_here(b) for b in model.buffers())
    model.to("cpu")
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    assert all(p.device == CPU for p in model.parameters())


def test_tied_weights_stay_tied():
    model = Tied().to(DEVICE)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    with torch.no_grad():
        model.embed.weight.fill_(2.0)
    assert model.head.weight.tolist() == [[2.0] * 4] * 5
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr() != 0


def train(model, optimizer, device):
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randint(5, (6,)).to(device)
        loss = nn.functional.cross_entropy(model(x), x.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw, no foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_made_before_the_move_trains_the_device(name):
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = Tied()
        optimizer = OPTIMIZERS[name](model.parameters())
        model.to(device)
        results.append(train(model, optimizer, device))
        state = [v for s in optimizer.state.values() for v in s.values()]
        assert all(v.device.type in (device, "cpu") for v in state if torch.is_tensor(v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_optimizer_continues_from_its_state():
    torch.manual_seed(0)
    model = Tied().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, DEVICE)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, DEVICE)

    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    again = Tied().to(DEVICE)
    resumed = torch.optim.Adam(again.parameters(), lr=0.1)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    got = train(again, resumed, DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_data_can_be_exchanged():
    p = nn.Parameter(torch.ones(2))
    moved = torch.full((2,), 3.0, device=DEVICE)
    p.data = moved
    assert is_here(p)
    assert p.tolist() == [3.0, 3.0]
    assert p.data_ptr() == moved.data_ptr()
    p.data = p.data.cpu()
    assert p.device == CPU
    x = torch.ones(2, device=DEVICE)
    x.data = torch.zeros(5, device=DEVICE)
    assert x.tolist() == [0.0] * 5


def test_the_keys_of_a_checkpoint_are_assigned():
    model = Tied()
    state = {k: v.to(DEVICE) for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert all(is_here(p) for p in model.parameters())
    meta = Tied().to("meta")
    meta.to_empty(device=DEVICE)
    meta.load_state_dict(state)
    assert meta.head.weight.shape == (5, 4)
    assert torch.equal(meta.head.weight, state["head.weight"])


def test_half_and_double():
    model = nn.Linear(2, 2).to(DEVICE, torch.bfloat16)
    assert (model.weight.dtype, is_here(model.weight)) == (torch.bfloat16, True)
    assert model.double().weight.dtype is torch.float64


def test_hooks_run_and_their_errors_are_raised():
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    seen = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(grad.tolist()))
    y.sum().backward()
    assert seen == [[1.0, 1.0, 1.0]]

    def wrong(grad):
        raise ValueError("from the hook")

    y = x * 2
    y.register_hook(wrong)
    with pytest.raises(ValueError, match="^from the hook$"):
        y.sum().backward()
    (x * 3).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0, 5.0]


def test_gradients_accumulate_in_one_leaf():
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    for _ in range(3):
        (x * x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    assert is_here(x.grad)


def test_second_derivatives():
    x = torch.tensor([2.0, 3.0], device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [12.0, 18.0]


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": lambda x: x.detach().clone(),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_tensor_is_copied(name):
    x = torch.arange(6.0).reshape(2, 3).to(DEVICE)[:, 1:]
    y = COPIES[name](x)
    assert is_here(y)
    assert (y.tolist(), y.dtype) == (x.tolist(), x.dtype)
    shares = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert shares == (name == "copy")


def test_a_module_is_copied():
    model = Tied().to(DEVICE)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight is not model.head.weight
    with torch.no_grad():
        model.embed.weight.zero_()
    assert twin.head.weight.abs().sum().item() > 0
    back = pickle.loads(pickle.dumps(model))
    assert back.head.weight is back.embed.weight
    assert is_here(back.scale)


def test_what_a_tensor_shares_is_copied_once():
    x = torch.arange(4.0, device=DEVICE)
    a, b = copy.deepcopy([x[:2], x[1:]])
    a.add_(10)
    assert b.tolist() == [11.0, 2.0, 3.0]


class Unrolled(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        return state


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3], enforce_sorted=True)
        out, state = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out)[0], state


RECURRENT = {
    "LSTM": lambda: nn.LSTM(3, 4, 2, dropout=0.0),
    "LSTM in bfloat16": lambda: nn.LSTM(3, 4, 2, bidirectional=True, dtype=torch.bfloat16),
    "LSTM in float64": lambda: nn.LSTM(3, 4, 2, bidirectional=True, dtype=torch.float64),
    "LSTM, batch first": lambda: nn.LSTM(3, 4, bias=False, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True),
    "LSTM, packed": lambda: Packed(nn.LSTM(3, 4, bidirectional=True)),
    "LSTMCell": lambda: Unrolled(nn.LSTMCell(3, 4)),
    "GRU": lambda: nn.GRU(3, 4, bidirectional=True),
    "GRU, batch first": lambda: nn.GRU(3, 4, 2, bias=False, batch_first=True),
    "GRU, packed": lambda: Packed(nn.GRU(3, 4, 2, bidirectional=True)),
    "GRUCell": lambda: Unrolled(nn.GRUCell(3, 4)),
    "RNN": lambda: nn.RNN(3, 4),
    "RNN of relu, both ways": lambda: nn.RNN(3, 4, 2, nonlinearity="relu", bidirectional=True),
    "RNN, packed": lambda: Packed(nn.RNN(3, 4)),
    "RNNCell": lambda: Unrolled(nn.RNNCell(3, 4)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_is_trained(name):
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        layer = RECURRENT[name]().to(device)
        dtype = next(layer.parameters()).dtype
        x = torch.rand(5, 2, 3).to(device, dtype).requires_grad_()
        out = torch.utils._pytree.tree_leaves(layer(x))
        sum(part.square().sum() for part in out).backward()
        results.append([*out, x.grad, *(p.grad for p in layer.parameters())])
    pairs = zip(*results, strict=True)
    assert all(torch.equal(a, b.cpu()) for a, b in pairs)


def test_a_cell_says_what_does_not_fit():
    for device in ("cpu", DEVICE):
        cell = nn.GRUCell(3, 4).to(device)
        with pytest.raises(RuntimeError, match="^input has inconsistent input_size: got 5 expect"):
            cell(torch.ones(2, 5, device=device))
        with pytest.raises(RuntimeError, match="^Expected sequence length to be larger than 0"):
            nn.GRU(3, 4).to(device)(torch.ones(0, 2, 3, device=device))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_evaluation_takes_its_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.rand(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        got = model.to(DEVICE)(x.to(DEVICE), src_key_padding_mask=mask.to(DEVICE)).cpu()
    assert torch.allclose(got[~mask], expected[~mask], atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_in_words():
    x, mask = torch.rand(2, 3, 8, device=DEVICE), torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    with pytest.raises(NotImplementedError, match="^neuron: nested tensors are not supported"):
        torch._nested_tensor_from_mask(x, mask, mask_check=False)
