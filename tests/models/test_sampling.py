import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling import Sampler, greedy, philox, uniform
from tests.models.peer import warped

DRAWS = 20_000
SAMPLER = Sampler()


def chi_square_limit(freedom):
    """The 99.9 % quantile, by the approximation of Wilson and Hilferty."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.09 * spread**0.5) ** 3


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, draws=DRAWS):
    """One token at each of `draws` positions."""
    return SAMPLER(
        logits.expand(draws, -1),
        torch.full((draws,), float(temperature)),
        torch.full((draws,), top_k, dtype=torch.int32),
        torch.full((draws,), float(top_p)),
        torch.full((draws,), seed),
        torch.arange(draws, dtype=torch.int32),
        torch.full((draws,), float(min_p)),
    )


def expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution, by a sort, one token after another."""
    odds = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(odds)), key=lambda token: -odds[token])
    order = order[: top_k or len(order)]
    total, before, kept = sum(odds[token] for token in order), 0.0, []
    for token in order:
        if not kept or top_p >= 1.0 or before < top_p * total:
            kept.append(token)
        before += odds[token]
    shares = torch.zeros_like(odds)
    kept = [token for token in kept if odds[token] >= min_p * odds.max()]
    shares[kept] = odds[kept]
    return shares / shares.sum()


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.75},
        {"top_k": 8, "top_p": 0.9, "temperature": 1.4},
        {"top_k": 3, "top_p": 0.999},
        {"top_p": 0.2, "temperature": 2.0},
        {"min_p": 0.3},
        {"min_p": 0.1, "top_k": 9, "top_p": 0.95, "temperature": 1.5},
    ],
)
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3])
def test_draws_follow_the_distribution(parameters, seed):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    shares = expected(logits, **parameters)
    counts = torch.bincount(draw(logits, seed=seed, **parameters).long(), minlength=12)
    assert counts[shares == 0].sum() == 0
    live = shares > 0
    wanted = shares[live] * DRAWS
    distance = ((counts[live] - wanted) ** 2 / wanted).sum().item()
    assert live.sum() == 1 or distance < chi_square_limit(int(live.sum()) - 1)


def test_a_top_k_of_one_and_a_tiny_top_p_are_greedy():
    logits = torch.randn(50)
    likeliest = int(logits.argmax())
    assert draw(logits, top_k=1, draws=200).unique().tolist() == [likeliest]
    assert draw(logits, top_p=1e-6, draws=200).unique().tolist() == [likeliest]
    assert draw(logits, temperature=1e-4, draws=200).unique().tolist() == [likeliest]


@pytest.mark.parametrize("top_p", [1e-30, 1e-44, 1e-50])  # the last is 0 in float32
def test_however_tiny_a_top_p_the_likeliest_is_kept(top_p):
    logits = torch.randn(50)
    assert draw(logits, top_p=top_p, draws=200).unique().tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [1e3, 1e6, 1e30])
def test_a_high_temperature_leaves_top_k_as_many(temperature):
    logits = torch.randperm(5000, generator=torch.Generator().manual_seed(3)).float()[None] / 100
    for top_k in (1, 2, 1024, 4999):
        mass = SAMPLER.mass(
            logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.ones(1)
        )
        assert int((mass > 0).sum()) == top_k
    mass = SAMPLER.mass(logits, torch.tensor([temperature]), torch.zeros(1), torch.tensor([0.1]))
    assert abs(int((mass > 0).sum()) - 500) < 30


def test_an_infinite_logit_is_the_likeliest():
    logits = torch.randn(50)
    logits[[7, 9]] = torch.inf
    assert draw(logits, draws=200).unique().tolist() == [7, 9]


def test_temperature_zero_is_greedy_whatever_the_rest_says():
    logits = torch.randn(64, 30)
    result = SAMPLER(
        logits,
        torch.zeros(64),
        torch.full((64,), 9, dtype=torch.int32),
        torch.full((64,), 0.5),
        torch.arange(64),
        torch.arange(64, dtype=torch.int32),
    )
    assert torch.equal(result, logits.argmax(-1).int())
    assert result.dtype == torch.int32


def test_greedy_takes_the_lowest_index_on_ties():
    logits = torch.zeros(2, 5000)
    logits[0, [17, 4000, 20]] = 3.0
    assert greedy(logits).tolist() == [17, 0]


def test_each_row_has_its_own_parameters():
    logits = torch.randn(1, 40).repeat(4, 1)
    together = SAMPLER(
        logits,
        torch.tensor([0.0, 1.0, 0.5, 2.0]),
        torch.tensor([0, 0, 4, 0], dtype=torch.int32),
        torch.tensor([1.0, 0.9, 1.0, 1.0]),
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([9, 8, 7, 6], dtype=torch.int32),
    )
    order = [2, 0, 3, 1]
    shuffled = SAMPLER(
        logits,
        torch.tensor([0.5, 0.0, 2.0, 1.0]),
        torch.tensor([4, 0, 0, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9]),
        torch.tensor([3, 1, 4, 2]),
        torch.tensor([7, 9, 6, 8], dtype=torch.int32),
    )
    assert shuffled.tolist() == together[order].tolist()


@given(
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 7, 100, 1500, 2999, 3000, 5000]),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.7, 1.0]),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
    seed=st.integers(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p, min_p, spread, seed):
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(seed)) * spread
    parameters = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    mass = SAMPLER.mass(logits, *parameters, torch.tensor([min_p]))
    wanted = warped(logits, temperature, top_k, top_p, min_p)
    # Beside an edge, rounding may put a few tokens on the other side.
    assert ((mass > 0) != (wanted > 0)).sum() <= 4
    edge = 3 * wanted[wanted > 0].min() + 1e-6
    assert ((mass / mass.sum() - wanted).abs().max() <= edge).all()


def test_a_nucleus_may_be_as_large_as_the_vocabulary():
    logits = torch.linspace(0.0, -0.1, 50_000)[None]
    share = torch.softmax(logits.double(), -1).cumsum(-1)
    for top_p in (0.3, 0.9, 0.999):
        mass = SAMPLER.mass(logits, torch.ones(1), torch.zeros(1), torch.tensor([top_p]))
        assert abs(int((mass > 0).sum()) - int((share < top_p).sum() + 1)) < 20


def test_a_top_k_may_be_as_large_as_the_vocabulary():
    logits = torch.randperm(5000, generator=torch.Generator().manual_seed(3)).float()[None] / 100
    for top_k in (1, 2, 1024, 1025, 4999, 5000, 9999):
        mass = SAMPLER.mass(logits, torch.ones(1), torch.tensor([top_k]), torch.ones(1))
        assert int((mass > 0).sum()) == min(top_k, 5000)


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    for top_k, top_p in ((2, 1.0), (0, 0.6)):
        mass = SAMPLER.mass(logits, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]))
        assert (mass[0] > 0).tolist() == [True, False, True, True, True, False]


def test_a_row_of_which_everything_is_excluded_gives_a_token_of_the_vocabulary():
    tokens = draw(torch.full((7,), -torch.inf), draws=20)
    assert ((tokens >= 0) & (tokens < 7)).all()


def test_tokens_without_mass_are_never_drawn():
    logits = torch.full((8,), -torch.inf)
    logits[[2, 5]] = 0.0
    assert draw(logits, draws=500).unique().tolist() == [2, 5]
    assert draw(logits, top_p=0.99, draws=500).unique().tolist() == [2, 5]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers of Random123, its authors' library."""
    left, right = philox(*(torch.tensor([word]) for word in (*counter, key)))
    assert (int(left), int(right)) == words


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
@settings(max_examples=50)
def test_uniform_is_below_one_and_a_function_of_seed_and_position(seed, position):
    def at(offset):
        where = torch.tensor([position, (position + offset) % 2**31], dtype=torch.int32)
        return uniform(torch.tensor([seed, seed]), where)

    values = at(1)
    assert values.dtype == torch.float32
    assert ((values >= 0) & (values < 1)).all()
    assert values[0] == at(12345)[0]
    assert values[0] != values[1]


def test_uniform_is_uniform():
    values = uniform(torch.full((100_000,), 3), torch.arange(100_000, dtype=torch.int32)).numpy()
    counts, _ = np.histogram(values, bins=8, range=(0, 1))
    assert ((counts - 12_500) ** 2 / 12_500).sum() < chi_square_limit(7)
