import torch
from torch import fx

from neuron_streams._compiler.segment import Window, hoist, overlap
from neuron_streams._compiler.trace import trace


def hoisted(function, *examples):
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = trace(function, examples, FakeTensorMode(allow_non_fake_inputs=True)).graph
    return graph, hoist(graph)


def check(function, *examples):
    """A graph that takes windows does what the function does; returns which it takes."""
    graph, sources = hoisted(function, *examples)
    theirs, ours = ([x.clone() for x in examples] for _ in range(2))
    taken = [
        ours[n] if w is None else ours[n].as_strided(w.size, w.stride, w.offset) for n, w in sources
    ]
    (got,), expected = fx.GraphModule({}, graph)(*taken), function(*theirs)
    for one, other in zip((got, *ours), (expected, *theirs), strict=True):
        assert torch.equal(one, other)
    return sources


def test_disjoint_windows_become_inputs():
    def function(kv, x):
        kv[0].add_(x)
        kv[1, 1].mul_(x[1])
        return kv[0] + x

    sources = check(function, torch.ones(2, 2, 3), torch.ones(2, 3))
    assert sources == (
        (0, Window((2, 3), (3, 1), 0)),
        (0, Window((3,), (1,), 9)),
        (1, None),
    )


def test_windows_that_overlap_stay_with_their_base():
    def function(kv):
        kv[:2].add_(1)
        return kv[1:] * 2

    assert check(function, torch.ones(3, 4)) == ((0, None),)


def test_a_base_that_is_read_as_a_whole_stays():
    def function(kv):
        kv[0].add_(1)
        return kv * 2

    assert check(function, torch.ones(3, 4)) == ((0, None),)


def test_what_is_only_read_stays():
    assert check(lambda x: x[0] + x[1], torch.ones(2, 3)) == ((0, None),)


def test_overlap_never_says_no_wrongly():
    row, column = Window((4,), (1,), 0), Window((4,), (4,), 4)
    assert not overlap(row, column)
    assert overlap(row, Window((4,), (4,), 3))
    assert overlap(row, row)
