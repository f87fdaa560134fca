"""Every name of torch.cuda has a row, and a row says the truth."""

from __future__ import annotations

import importlib
import inspect
import operator
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.cuda.comm

import neuron_streams
from neuron_streams import surface
from neuron_streams.errors import AbsentError, AbsentImportError, UnsupportedError

OURS = {
    "torch.cuda": neuron_streams,
    "torch.cuda.Stream": neuron_streams.Stream,
    "torch.cuda.Event": neuron_streams.Event,
    "torch.cuda.amp": neuron_streams.amp,
    "torch.cuda.comm": neuron_streams.comm,
    "torch.cuda.nvtx": neuron_streams.nvtx,
    "torch.neuron": neuron_streams,
    "neuron_streams": neuron_streams,
}
THEIRS = {
    "torch.cuda": torch.cuda,
    "torch.cuda.Stream": torch.cuda.Stream,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.cuda.amp": torch.cuda.amp,
    "torch.cuda.comm": torch.cuda.comm,
    "torch.cuda.nvtx": torch.cuda.nvtx,
    "torch.accelerator": torch.accelerator,
}
IS_2_13 = torch.__version__.startswith("2.13.")
ROWS = list(surface.rows())


def signature(value):
    """The parameters and their defaults; None where there is nothing to be seen."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def by_name(row):
    return row.full_name


def test_names_are_unique_and_classes_known():
    assert len({row.full_name for row in ROWS}) == len(ROWS)
    assert {row.kind for row in ROWS} == {"match", "modified", "mismatch", "absent", "added"}


def test_every_public_name_of_torch_cuda_has_a_row():
    known = {row.name for row in surface.rows("torch.cuda")} | surface.OUTSIDE
    assert set(torch.cuda.__all__) - known == set()


@pytest.mark.parametrize("module", [torch.cuda.amp, torch.cuda.comm, torch.cuda.nvtx])
def test_every_public_name_of_a_submodule_has_a_row(module):
    known = {row.name for row in surface.rows(module.__name__)}
    assert set(getattr(module, "__all__", [])) - known == set()


def test_every_public_name_of_torch_accelerator_has_a_row():
    known = {row.name for row in surface.rows("torch.accelerator")}
    assert set(torch.accelerator.__all__) - known == set()


@pytest.mark.parametrize(
    ("space", "bases"),
    [
        ("torch.cuda.Stream", (torch.cuda.Stream, torch.Stream)),
        ("torch.cuda.Event", (torch.cuda.Event, torch.Event)),
    ],
)
def test_every_public_method_has_a_row(space, bases):
    known = {row.name for row in surface.rows(space)}
    public = {name for base in bases for name in dir(base) if not name.startswith("_")}
    assert public - known == set()


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind in ("match", "modified")], ids=by_name)
def test_what_matches_has_the_signature_of_torch(row):
    if row.space == "torch.accelerator":
        pytest.skip("torch's own functions")
    ours = inspect.getattr_static(OURS[row.space], row.name, None)
    assert hasattr(OURS[row.space], row.name)
    if row.signature and row.kind == "match" and not inspect.isclass(ours):
        assert signature(getattr(OURS[row.space], row.name)) in (row.signature, None)
    elif row.signature and row.kind == "match":
        assert signature(ours) == row.signature


@pytest.mark.skipif(not IS_2_13, reason="the rows are those of torch 2.13")
@pytest.mark.parametrize("row", [r for r in ROWS if r.space in THEIRS], ids=by_name)
def test_the_stored_signature_is_that_of_torch(row):
    theirs = getattr(THEIRS[row.space], row.name, None)
    if theirs is None or row.name.startswith("_") or not row.signature:
        pytest.skip("torch's CPU build lacks it")
    found = signature(theirs)
    if found is not None:
        assert found == row.signature


ABSENT = [r for r in ROWS if r.kind == "absent"]
CALLABLE = [r for r in ABSENT if r.space == "torch.cuda" and r.signature]


@pytest.mark.parametrize("row", CALLABLE, ids=by_name)
def test_what_is_absent_can_be_named_and_says_what_to_use_when_it_is_called(row):
    exec(f"from neuron_streams import {row.name}", found := {})
    absent = found[row.name]
    assert absent is getattr(neuron_streams, row.name)
    assert absent.__name__ == row.name
    for arguments in ([], [1, 2]):
        with pytest.raises(UnsupportedError, match=rf"^neuron_streams\.{row.name}: absent\. ") as e:
            absent(*arguments)
        assert row.note in str(e.value)
        assert not isinstance(e.value, AttributeError)


@pytest.mark.skipif(not IS_2_13, reason="the rows are those of torch 2.13")
@pytest.mark.parametrize("row", CALLABLE, ids=by_name)
def test_an_absent_class_is_a_class(row):
    theirs = getattr(torch.cuda, row.name)
    ours = getattr(neuron_streams, row.name)
    assert isinstance(ours, type) == isinstance(theirs, type)
    if isinstance(ours, type):
        assert not isinstance(3, ours)
        assert ours | None
        assert issubclass(type("Mine", (ours,), {}), ours)


@pytest.mark.parametrize("row", [r for r in ABSENT if r not in CALLABLE], ids=by_name)
def test_what_is_absent_says_what_to_use(row):
    assert row.note.endswith(".")
    if row.space == "torch.accelerator":
        pytest.skip("torch's own functions")
    holder = OURS[row.space]
    assert not hasattr(holder, row.name)
    with pytest.raises(AbsentError, match=rf"{row.name}: absent\. ") as caught:
        getattr(holder, row.name)
    assert row.note in str(caught.value) or row.space == "torch.neuron"
    assert isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("row", ABSENT, ids=by_name)
def test_what_to_use_instead_is_there(row):
    for path in re.findall(r"neuron_streams((?:\.\w+)+)", row.note):
        found = operator.attrgetter(path[1:])(neuron_streams)
        assert callable(found) or sys.modules.get(f"neuron_streams{path}") is found, path


def test_the_module_of_streams_holds_what_torch_has_there():
    module = importlib.import_module("neuron_streams.streams")
    assert module is neuron_streams.streams
    for name in ("Stream", "Event", "ExternalStream"):
        assert hasattr(torch.cuda.streams, name)
    for name in module.__all__:
        assert getattr(module, name) is getattr(neuron_streams, name)


def test_a_submodule_is_not_named_as_a_function_or_a_class():
    for module in pkgutil.iter_modules(neuron_streams.__path__):
        path = f"neuron_streams.{module.name}"
        if module.name != "__main__" and not module.name.startswith("_"):
            assert importlib.import_module(path) is getattr(neuron_streams, module.name)


def test_public_classes_say_the_package_and_not_a_file_of_it():
    for name in dir(neuron_streams):
        value = getattr(neuron_streams, name)
        if isinstance(value, type) and value.__module__.startswith("neuron_streams"):
            assert value.__module__ == "neuron_streams", name


def test_dir_shows_public_names_alone():
    names = dir(neuron_streams)
    assert not [name for name in names if name.startswith("_") and not name.endswith("__")]
    assert {"Stream", "Event", "current_stream", "memory", "streams"} < set(names)
    assert "TYPE_CHECKING" not in names


def test_absent_methods_raise_on_objects():
    with pytest.raises(AbsentError, match="torch.multiprocessing"):
        neuron_streams.Event().ipc_handle()
    assert not hasattr(neuron_streams.Event, "from_ipc_handle")


def test_a_name_that_nobody_has_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'") as caught:
        _ = neuron_streams.nonsense
    assert not isinstance(caught.value, UnsupportedError)


def test_what_torch_accelerator_cannot_do_it_says_itself():
    neuron_streams.init()
    for row in surface.rows("torch.accelerator"):
        if row.kind == "absent":
            with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
                getattr(torch.accelerator, row.name)()


def test_the_table_shows_every_row():
    table = surface.markdown()
    for row in ROWS:
        assert f"`{row.name}" in table
    assert surface.markdown("torch.neuron").count("\n") == len(surface.SPACES["torch.neuron"]) + 1


def test_the_document_shows_the_table():
    document = (Path(__file__).parents[1] / "docs/surface.md").read_text()
    shown = document.split("<!-- surface -->")[1].split("<!-- /surface -->")[0]
    assert shown.strip() == surface.markdown().strip(), "put `neuron-streams surface` there again"


ASKED_FOR = {
    "torch.cuda": "current_stream default_stream set_stream stream StreamContext synchronize "
    "get_stream_from_external current_device device_count is_available is_initialized init "
    "set_device device device_of _DeviceGuard _exchange_device _maybe_exchange_device "
    "_set_stream_by_id _sleep set_sync_debug_mode get_sync_debug_mode "
    "is_current_stream_capturing check_error CudaError OutOfMemoryError AcceleratorError Stream "
    "ExternalStream Event",
    "torch.cuda.Stream": "stream_id device_index device_type device cuda_stream priority "
    "native_handle _as_parameter_ __cuda_stream__ priority_range query synchronize is_capturing "
    "wait_event wait_stream record_event __eq__ __hash__ __enter__",
    "torch.cuda.Event": "query wait synchronize device cuda_event event_id elapsed_time record",
}


def test_what_streams_are_made_of_is_there():
    kinds = {(row.space, row.name): row.kind for row in ROWS}
    for space, names in ASKED_FOR.items():
        for name in names.split():
            assert kinds[space, name] in ("match", "modified"), (space, name)


NOT_ASKED_FOR = {  # graphs, IPC, GreenContext and cudart
    "torch.cuda": "graph_pool_handle CUDAGraph graph make_graphed_callables ipc_collect cudart "
    "GreenContext",
    "torch.cuda.Event": "ipc_handle from_ipc_handle",
}


def test_what_streams_are_not_made_of_is_absent():
    kinds = {(row.space, row.name): row.kind for row in ROWS}
    for space, names in NOT_ASKED_FOR.items():
        for name in names.split():
            assert kinds[space, name] == "absent", (space, name)


@pytest.mark.parametrize(
    "name", [r.name for r in ABSENT if r.space == "torch.cuda" and r not in CALLABLE]
)
def test_importing_what_is_absent_says_what_to_use(name):
    with pytest.raises(AbsentImportError, match=rf"^neuron_streams\.{name}: absent\. ") as caught:
        exec(f"from neuron_streams import {name}", {})
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, UnsupportedError)


def test_importing_what_nobody_has_is_a_plain_import_error():
    with pytest.raises(ImportError, match="cannot import name 'nonsense'") as caught:
        exec("from neuron_streams import nonsense", {})
    assert not isinstance(caught.value, UnsupportedError)
    with pytest.raises(ModuleNotFoundError):
        exec("import neuron_streams.graph", {})


def test_the_protocol_of_cuda_streams_refuses_to_hand_out_a_pointer():
    s = neuron_streams.Stream()
    assert hasattr(s, "__cuda_stream__")
    with pytest.raises(UnsupportedError, match=r"^Stream\.__cuda_stream__: this is no CUDA stream"):
        s.__cuda_stream__()


def test_exceptions_of_cuda_code_are_classes_that_can_be_caught():
    assert neuron_streams.OutOfMemoryError is torch.OutOfMemoryError
    assert issubclass(neuron_streams.AcceleratorError, RuntimeError)
    assert neuron_streams.check_error(0) is None
    with pytest.raises(neuron_streams.CudaError, match="^status 700"):
        neuron_streams.check_error(700)
