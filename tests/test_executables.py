import contextlib
import gc
import threading
import weakref

import pytest
import torch

import neuron_streams
from neuron_streams import Executable, compile  # noqa: A004
from neuron_streams._compiler import plan
from neuron_streams._context import core
from neuron_streams.executables import TensorSpec
from neuron_streams.testing import Gate
from tests.compiler.compiled import deep, model, needs_cxx, pair
from tests.compiler.plans import deep_inputs


def exported(function, *examples, **options):
    return compile(function, examples, target="exported", **options)


@pytest.fixture
def add():
    return exported(lambda x, y: x + y, torch.ones(2, 3), torch.ones(3), name="add")


def test_it_says_what_it_takes_and_gives():
    def step(ids, kv):
        return kv[0].add_(ids), ids * 2

    made = exported(step, torch.ones(2), torch.ones(3, 2), mutates=["kv"])
    assert [spec.name for spec in made.inputs] == ["ids", "kv"]
    assert made.inputs[1] == TensorSpec("kv", torch.float32, (3, 2), (2, 1))
    assert (made.name, made.mutates, made.target) == ("step", ("kv",), "exported")
    assert repr(made) == (
        "<Executable step(ids: float32[2], kv: float32[3, 2]) -> "
        "(output_0: float32[2], output_1: float32[2]), mutates=['kv'], target='exported'>"
    )


@needs_cxx
def test_compiled_results_are_futures_of_the_current_stream():
    stream = neuron_streams.Stream()
    with Gate(stream) as gate, neuron_streams.stream(stream):
        results = pair()(torch.ones(2, 3), torch.arange(3.0))
        assert isinstance(results, tuple)
        assert [result.device.type for result in results] == ["neuron"] * 2
        assert not stream.query()
        gate.open()
    assert results[0].cpu().tolist() == [[1, 2, 3]] * 2
    assert results[1].cpu().tolist() == [[2, 2, 2]] * 2


@needs_cxx
def test_caches_are_updated_in_place_block_by_block():
    theirs, (x, rows, kv) = deep_inputs(), deep_inputs()
    cache = kv.to("neuron")
    for _ in range(3):
        result = deep()(x, rows, cache)
        torch.testing.assert_close(result.cpu(), model()(*theirs))
    torch.testing.assert_close(cache.cpu(), theirs[2])
    assert torch.equal(kv, deep_inputs()[2])


@needs_cxx
def test_block_by_block_and_whole_are_the_same(monkeypatch):
    monkeypatch.setattr(plan, "find_blocks", lambda _: [])
    whole = compile(model(), deep_inputs(), mutates=["kv"])
    assert len(whole._payload.content.libraries) == 1
    x, rows, kv = deep_inputs()
    caches = [kv.to("neuron"), kv.to("neuron")]
    results = [e(x, rows, c).cpu() for e, c in zip((whole, deep()), caches, strict=True)]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(cache.cpu() for cache in caches), rtol=1e-6, atol=1e-6)


@needs_cxx
def test_executables_of_a_model_share_its_weights():
    other = compile(model(), deep_inputs(), mutates=["kv"])
    shared = {weight.data_ptr() for weight in deep()._payload.content.weights}
    assert {weight.data_ptr() for weight in other._payload.content.weights} == shared
    assert shared == {t.data_ptr() for t in (*model().parameters(), *model().buffers())}


def test_without_a_compiler_what_the_cache_lacks_is_an_error(monkeypatch):
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler, and the cache has not"):
        compile(lambda x: x * 0.123456, (torch.ones(41),))


@needs_cxx
def test_without_a_compiler_the_cache_serves(monkeypatch):
    function = lambda x: x * 2 + 1  # noqa: E731
    compile(function, (torch.ones(3),))
    monkeypatch.setenv("NEURON_STREAMS_COMPILER", "none")
    made = compile(function, (torch.ones(3),))
    assert made.target == "cpu"
    assert made(torch.ones(3)).tolist() == [3.0] * 3


DRAWING = {
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randn": lambda x: torch.randn(64) + x,
    "randint": lambda x: torch.randint(0, 1000, (64,)) + x,
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(x, 8),
    "in place": lambda x: x.clone().exponential_(),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_compiled_function_draws_from_the_device(name):
    made = compile(DRAWING[name], (torch.ones(64),))
    x, results = torch.ones(64, device="neuron"), []
    for host_seed in (1, 2):
        torch.random.default_generator.manual_seed(host_seed)
        before = torch.get_rng_state()
        neuron_streams.manual_seed(5)
        results.append([made(x).tolist() for _ in range(2)])
        assert torch.equal(before, torch.get_rng_state())
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_what_is_drawn_depends_on_the_order_of_submission():
    made = compile(DRAWING["dropout"], (torch.ones(64),))
    x, side = torch.ones(64, device="neuron"), neuron_streams.Stream()
    results = []
    for held in (False, True):
        neuron_streams.manual_seed(7)
        with Gate() if held else contextlib.nullcontext():
            first = made(x)
            with neuron_streams.stream(side):
                second = made(torch.ones(64)).tolist()  # runs before the first where that is held
        results.append([first.tolist(), second])
    assert results[0] == results[1]


def test_what_draws_and_takes_no_generator_is_refused():
    with pytest.raises(NotImplementedError, match="aten.native_dropout.default draws random"):
        compile(lambda x: torch.native_dropout(x, 0.5, True)[0], (torch.ones(3),))


def test_what_draws_cannot_be_saved(tmp_path):
    made = compile(DRAWING["dropout"], (torch.ones(64),))
    with pytest.raises(NotImplementedError, match="draws random numbers"):
        made.save(tmp_path / "dropout.nsx")


def test_host_inputs_may_be_changed_at_once(add):
    x = torch.ones(2, 3)
    with Gate() as gate:
        result = add(x, torch.ones(3))
        x.zero_()
        gate.open()
    assert result.cpu().tolist() == [[2, 2, 2]] * 2


def test_host_inputs_of_any_layout_are_read_right(add):
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(add(x.T, torch.zeros(6)[::2]).cpu(), x.T)


def test_results_feed_the_next_call(add):
    x, y = torch.ones(2, 3).to("neuron"), torch.ones(3).to("neuron")
    for _ in range(3):
        x = add(x, y)
    assert x.cpu().tolist() == [[4, 4, 4]] * 2


def test_a_result_is_never_an_input():
    same = exported(lambda x: (x, x[0], x.add_(1)), torch.ones(2, 3), mutates=["x"])
    x = torch.ones(2, 3).to("neuron")
    first = [result.cpu() for result in same(x)]
    assert [result.tolist() for result in first] == [[[2] * 3] * 2, [2] * 3, [[2] * 3] * 2]
    whole, row, _ = same(x)
    same(x)
    assert whole.cpu().tolist() == [[3, 3, 3]] * 2
    assert row.cpu().tolist() == [3, 3, 3]


def test_structures_come_back():
    one = torch.ones(2)
    assert exported(lambda x: x + 1, one)(one).device.type == "neuron"
    assert isinstance(exported(lambda x: [x + 1, x], one)(one), list)
    nested = exported(lambda x: {"a": (x + 1, x), "b": x * 2}, one)
    results = nested(one)
    assert results["a"][0].cpu().tolist() == [2, 2]
    assert [spec.name for spec in nested.outputs] == ["a.0", "a.1", "b"]
    assert exported(lambda x: (), one)(one) == ()


def test_examples_may_come_by_name():
    made = compile(lambda y, x: x - y, {"x": torch.ones(2), "y": torch.ones(2)}, target="exported")
    assert [spec.name for spec in made.inputs] == ["x", "y"]
    assert made(torch.full((2,), 3.0), torch.ones(2)).cpu().tolist() == [2, 2]


def test_scalars_and_empty_tensors():
    made = exported(lambda x, y: (x * 2, y + x), torch.tensor(1.0), torch.ones(0, 3))
    double, empty = made(torch.tensor(4.0), torch.ones(0, 3))
    assert double.cpu().item() == 8
    assert empty.cpu().shape == (0, 3)


def test_a_wrong_number_of_inputs(add):
    with pytest.raises(TypeError, match=r"^add takes 2 tensors \(x: float32\[2, 3\], y: float32"):
        add(torch.ones(2, 3))


def test_a_wrong_dtype(add):
    with pytest.raises(TypeError, match=r"^add: input 'y' expects float32\[3\], got int64\[3\]"):
        add(torch.ones(2, 3), torch.arange(3))
    with pytest.raises(TypeError, match=r"^add: input 'y' expects float32\[3\], got float64\[3\]"):
        add(torch.ones(2, 3), torch.ones(3, dtype=torch.float64).to("neuron"))


def test_a_wrong_shape(add):
    for x in (torch.ones(3, 2), torch.ones(3, 2).to("neuron")):
        with pytest.raises(ValueError, match=r"^add: input 'x' expects float32\[2, 3\], got floa"):
            add(x, torch.ones(3))


def test_no_tensor_at_all(add):
    with pytest.raises(TypeError, match=r"^add: input 'y' expects a tensor, got float"):
        add(torch.ones(2, 3), 1.0)


def test_a_tensor_of_another_device(add):
    with pytest.raises(ValueError, match=r"^add: input 'x' is on meta"):
        add(torch.ones(2, 3, device="meta"), torch.ones(3))
    x = torch.ones(2, 3).to("neuron:1")
    with pytest.raises(ValueError, match=r"^add: input 'x' is on neuron:1, but the current stream"):
        add(x, torch.ones(3))
    with neuron_streams.device(1):
        assert add(x, torch.ones(3)).device == torch.device("neuron:1")


def test_a_device_tensor_that_is_not_contiguous(add):
    turned = torch.ones(3, 2).to("neuron").t()
    with pytest.raises(ValueError, match=r"^add: input 'x' has strides \(1, 2\)"):
        add(turned, torch.ones(3))


def test_a_host_tensor_cannot_be_updated():
    made = exported(lambda kv: kv.add_(1) * 2, torch.ones(3), mutates=["kv"], name="step")
    with pytest.raises(ValueError, match=r"^step: input 'kv' is updated in place, so it must be"):
        made(torch.ones(3))


def test_what_is_updated_must_not_be_given_twice():
    def step(x, kv):
        return x + kv.mul_(2)

    made = exported(step, torch.ones(3), torch.ones(3), mutates=["kv"])
    both = torch.ones(6).to("neuron")
    first, second = both[:3], both[3:]
    with pytest.raises(ValueError, match=r"^step: inputs \['x', 'kv'\] share memory, and 'kv'"):
        made(first, first)
    assert made(first, second).cpu().tolist() == [3, 3, 3]
    assert both.tolist() == [1, 1, 1, 2, 2, 2]


def test_mutates_must_say_what_is_true():
    def step(x, kv):
        kv[0].add_(x)
        return x * 2

    examples = [torch.ones(3), torch.ones(2, 3)]
    with pytest.raises(ValueError, match=r"^step: the function updates \['kv'\] in place, which"):
        exported(step, *examples)
    with pytest.raises(ValueError, match=r"^step: mutates names \['x'\], which the function does"):
        exported(step, *examples, mutates=["x", "kv"])
    with pytest.raises(ValueError, match=r"^step: mutates names \['cache'\]"):
        exported(step, *examples, mutates=["kv", "cache"])


def test_examples_must_be_tensors():
    with pytest.raises(TypeError, match=r"^step: example 'y' is int, not a tensor"):
        compile(lambda x, y: x + y, [torch.ones(3), 2], name="step")


def test_targets():
    with pytest.raises(ValueError, match=r"^f: target='neuron' is the kind of core of the device"):
        compile(lambda x: x, [torch.ones(3)], name="f", target="neuron")
    with pytest.raises(ValueError, match=r"^f: target='gpu' is none of"):
        compile(lambda x: x, [torch.ones(3)], name="f", target="gpu")


def test_save_and_load_are_there(tmp_path, add):
    add.save(tmp_path / "add.zip")
    loaded = Executable.load(tmp_path / "add.zip")
    assert loaded(torch.ones(2, 3), torch.ones(3)).cpu().tolist() == [[2, 2, 2]] * 2


def test_torchs_default_device_may_be_ours(tmp_path):
    neuron_streams.init()
    torch.set_default_device("neuron")
    try:
        host = torch.ones(4, device="cpu")
        triple = compile(lambda x: x * 3 + torch.ones(4), (host,))
        triple.save(tmp_path / "triple")
        for exe in (triple, Executable.load(tmp_path / "triple")):
            assert exe(host).tolist() == [4.0] * 4
            assert exe(torch.tensor([1.0] * 4)).tolist() == [4.0] * 4
    finally:
        torch.set_default_device(None)


def test_a_sparse_tensor_is_refused(add):
    with pytest.raises(
        ValueError, match=r"^add: input 'x' is torch.sparse_coo. Give it x.to_dense"
    ):
        add(torch.ones(2, 3).to_sparse(), torch.ones(3))


def test_examples_may_be_one_tensor():
    def function(a, b, c):
        return a - b, c.add_(a)

    one = torch.ones(4)
    exe = neuron_streams.compile(function, (one, one, one), mutates=("c",), name="examples alike")
    a, b, c = (torch.full((4,), x).to("neuron") for x in (5.0, 3.0, 1.0))
    difference, total = exe(a, b, c)
    assert difference.tolist() == [2.0] * 4
    assert total.tolist() == c.tolist() == [6.0] * 4


def test_memory_of_an_executable_that_nothing_names_is_let_go():
    class Watched:
        name = "watched"

        def run(self, inputs):
            return [torch.zeros(2)]

    handle = Watched()
    gone = threading.Event()
    weakref.finalize(handle, gone.set)
    loaded = core().Loaded("watched", [], [(torch.float32, (2,), (1,))], [], 0, handle, False)
    with Gate():
        (x,) = loaded.call([])
        del loaded, handle
        gc.collect()
        assert not gone.is_set(), "a pending command names it"
    assert x.tolist() == [0.0, 0.0]
    while not gone.wait(0.01):  # the device lets go of a command after it counts as completed
        core().tidy()
