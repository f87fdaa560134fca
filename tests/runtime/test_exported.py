import torch

from neuron_streams._runtime.exported import ExportedHandle


def test_outputs_are_fresh_and_contiguous():
    def graph(x):
        twice = x * 2
        return x, twice, twice, twice.T, x[0]

    x = torch.arange(6.0).view(2, 3)
    outputs = ExportedHandle("test", graph).run([x])
    assert [output.tolist() for output in outputs] == [value.tolist() for value in graph(x)]
    assert all(output.is_contiguous() for output in outputs)
    storages = {output.untyped_storage().data_ptr() for output in (x, *outputs)}
    assert len(storages) == 6


def test_updates_reach_the_callers_memory():
    kv = torch.zeros(2, 2)
    ExportedHandle("test", lambda kv: kv[0].add_(1).sum()).run([kv])
    assert kv.tolist() == [[1, 1], [0, 0]]
