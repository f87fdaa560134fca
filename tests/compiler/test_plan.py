import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from neuron_streams._compiler.plan import plan
from neuron_streams._runtime.program import Run, Slice
from tests.compiler.plans import Deep, deep_inputs, run_plan


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def agree(function, *inputs):
    """The plan gives the results of the function, and leaves the inputs as it does."""
    planned = plan(function, inputs)
    theirs, ours = copies(inputs), copies(inputs)
    with torch.no_grad():
        expected = function(*theirs)
        got = run_plan(planned, *ours)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip((*expected, *theirs), (*got, *ours), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for result in got:
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() not in {
            t.untyped_storage().data_ptr() for t in (*ours, *(o for o in got if o is not result))
        }
    return planned


def test_repeated_layers_share_a_segment():
    planned = agree(Deep(), *deep_inputs())
    runs = [step for step in planned.steps if isinstance(step, Run)]
    assert [run.library for run in runs] == [0, 1, 1, 1, 1, 2]
    assert len(planned.segments) == 3
    assert planned.mutated == (2,)


def test_each_layer_has_its_windows_of_the_cache():
    planned = plan(Deep(), deep_inputs())
    slices = [step for step in planned.steps if isinstance(step, Slice)]
    assert [step.offset for step in slices] == [number * 20 for number in range(8)]
    assert {step.source for step in slices} == {2}


def test_weights_are_the_tensors_of_the_module_once():
    model = Deep()
    planned = plan(model, deep_inputs())
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert sorted(weight.data_ptr() for weight in planned.weights) == sorted(own)


def test_unequal_layers_are_taken_whole():
    planned = agree(Deep(scales=(1.0, 1.0, 2.0, 1.0)), *deep_inputs())
    assert len(planned.segments) == 1


def test_a_function_without_layers_is_one_segment():
    planned = agree(lambda x, y: (x + y, x.T @ y), torch.ones(3, 2), torch.ones(3, 2))
    assert len(planned.segments) == 1
    assert planned.mutated == ()


def test_outputs_are_fresh():
    def function(x, y):
        twice = y * 2
        return x, x[0], twice, twice.view(-1), twice.T, twice[1:], y.add_(1)

    planned = agree(function, torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    assert planned.mutated == (1,)


def test_a_layer_that_takes_its_own_result_for_a_cache_is_taken_whole():
    model = Deep()
    inputs = deep_inputs()

    def function(x, rows, kv):
        return model(x, rows, kv * 2)

    assert len(agree(function, *inputs).segments) == 1


def test_what_is_between_layers_is_a_segment_each():
    model = Deep()

    def function(x, rows, kv):
        for number, layer in enumerate(model.layers):
            x = layer(x, kv[number], rows.long()) + 1
        return x

    planned = agree(function, *deep_inputs())
    assert sum(isinstance(step, Run) for step in planned.steps) == 9


def test_a_buffer_that_is_updated_is_refused():
    model = Deep()

    def function(x):
        return model.bias.add_(x)

    with pytest.raises(ValueError, match=r"^the function updates a tensor of its own in place"):
        plan(function, [torch.ones(8)])


def test_values_are_not_there_while_tracing():
    with pytest.raises(ValueError, match=r"^the function asks for the value of a tensor"):
        plan(lambda x: x * 2 if x.sum() > 0 else x, [torch.ones(3)])


def test_only_tensors_come_back():
    with pytest.raises(TypeError, match=r"^output 1 is 3, but only tensors"):
        plan(lambda x: (x * 2, 3), [torch.ones(3)])


steps = st.lists(
    st.sampled_from(["layer", "double", "add_", "copy_", "row", "turn", "cache", "read"]),
    max_size=12,
)


@settings(max_examples=25)
@given(steps)
def test_any_mixture_of_layers_windows_and_updates(names):
    model = Deep(layers=3)

    def function(x, rows, kv):
        count = 0
        for name in names:
            if name == "layer":
                x = model.layers[count % 3](x, kv[count % 3], rows.long())
                count += 1
            elif name == "double":
                x = x * 2
            elif name == "add_":
                x = x + 0
                x.add_(1)
            elif name == "copy_":
                kv[1, 0, :2].copy_(x[:, :4])
            elif name == "row":
                x = x[:1].expand(2, 8)
            elif name == "turn":
                x = x.T.contiguous().T
            elif name == "cache":
                kv[0, 1].mul_(0.5)
            else:
                x = x + kv[2, 0, 0, 0]
        return x, x[0]

    inputs = deep_inputs(layers=3)
    planned = plan(function, inputs)
    theirs, ours = copies(inputs), copies(inputs)
    with torch.no_grad():
        expected, got = function(*theirs), run_plan(planned, *ours)
    for one, other in zip((*expected, theirs[2]), (*got, ours[2]), strict=True):
        torch.testing.assert_close(one, other)  # a layer sees contiguous inputs, eager not
