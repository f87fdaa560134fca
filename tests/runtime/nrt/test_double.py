"""The double is strict: each use that hardware would corrupt or forbid is a violation.

Driven by bare calls of the library, as a careless user would.
"""

from __future__ import annotations

import ctypes

import pytest

from neuron_streams._runtime.nrt.lib import Library
from neuron_streams._runtime.nrt.queue import NUMBER
from neuron_streams._runtime.nrt.structs import MemoryStats, Version
from tests.runtime.nrt.doubled import Double, neff

BYTES = 16


class User:
    """A careless user of the library: two tensors, a model, and no check of its own."""

    def __init__(self, abi):
        self.double = Double(abi)
        self.library = Library(self.double.path)
        self.library.call("nrt_init", 1, b"", b"")
        self.a, self.b = (self.tensor() for _ in range(2))
        self.model = ctypes.c_void_p()
        text = neff("copy", {"x": 4}, {"y": 4})
        self.library.call("nrt_load", text, len(text), 0, -1, ctypes.byref(self.model))
        self.inputs, self.outputs = self.set_of(b"x", self.a), self.set_of(b"y", self.b)
        self.host = ctypes.create_string_buffer(BYTES)
        self.trackers = {}
        self.outcomes = []

    def tensor(self, device=0):
        made = ctypes.c_void_p()
        self.library.call("nrt_tensor_allocate", 0, device, BYTES, None, ctypes.byref(made))
        return made

    def set_of(self, name, tensor):
        made = ctypes.c_void_p()
        self.library.call("nrt_allocate_tensor_set", ctypes.byref(made))
        self.library.call("nrt_add_tensor_to_tensor_set", made, name, tensor)
        return made

    def outcome(self):
        if self.double.abi != "2.28":
            self.outcomes.append(ctypes.c_int(-1))
            return ctypes.byref(self.outcomes[-1])
        tracker = ctypes.c_void_p()
        self.library.call("nrta_error_tracker_create", 0, ctypes.byref(tracker))
        return tracker

    def schedule(self, name, *arguments, queue=0, core=True):
        sequence = ctypes.c_uint64()
        where = (0,) if core and self.double.abi != "2.28" else ()
        outcome = self.outcome()
        status = self.library.functions[name](
            *arguments, *where, queue, outcome, ctypes.byref(sequence)
        )
        return status, sequence.value

    def execute(self, queue=0):
        arguments = self.model, self.inputs, self.outputs
        return self.schedule("nrta_execute_schedule", *arguments, queue=queue, core=False)

    def write(self, tensor, queue=0):
        address = ctypes.addressof(self.host)
        return self.schedule("nrta_tensor_write", tensor, address, 0, BYTES, queue=queue)

    def read(self, tensor, queue=0):
        address = ctypes.addressof(self.host)
        return self.schedule("nrta_tensor_read", address, tensor, 0, BYTES, queue=queue)

    def last(self, unit, queue=0):
        """Observe what a queue has completed; its number."""
        sequence = ctypes.c_uint64()
        self.library.call("nrta_get_sequence", 0, unit, queue, ctypes.byref(sequence))
        return sequence.value & NUMBER

    def finish(self, unit, number=1, queue=0):
        while self.last(unit, queue) < number:
            pass


@pytest.fixture
def user(abi):
    made = User(abi)
    yield made
    made.double.reset()


def said(user, *words):
    found = user.double.violations()
    assert len(found) >= 1, "the double saw nothing"
    assert any(all(word in line for word in words) for line in found), found


def test_a_careful_user_is_held_nothing_against(user):
    user.write(user.a)
    user.finish(user.double.write)
    user.execute()
    user.finish(user.double.compute)
    user.read(user.b)
    user.finish(user.double.read)
    assert user.double.violations() == []


def test_a_consumer_on_another_queue_before_its_producer(user):
    user.write(user.a)
    user.execute()
    said(user, "scheduled to read what request 1 of unit", "writes")


def test_it_is_about_what_was_observed_not_about_luck(user):
    user.write(user.a)
    while not user.double.history():
        pass
    user.execute()
    said(user, "before the completion of that was observed")


def test_a_read_before_its_producer(user):
    user.execute()
    user.read(user.b)
    said(user, "scheduled to read what request 1 of unit")


def test_an_overwrite_of_an_input_that_is_being_read(user):
    user.execute()
    user.write(user.a)
    said(user, "scheduled to write what request 1 of unit", "reads")


def test_two_writers(user):
    user.execute()
    user.write(user.b)
    said(user, "scheduled to write what request 1 of unit", "writes")


def test_two_queues_of_one_unit_are_two_queues(user):
    user.write(user.a)
    user.write(user.a, queue=1)
    said(user, "queue 1: scheduled to write what request 1")


def test_synchronous_calls_race_too(user):
    user.execute()
    user.library.nrt_tensor_read(user.b, ctypes.addressof(user.host), 0, BYTES)
    said(user, "nrt_tensor_read: of memory that a request in flight uses")
    user.library.nrt_tensor_write(user.a, ctypes.addressof(user.host), 0, BYTES)
    said(user, "nrt_tensor_write: of memory that a request in flight uses")


def test_objects_freed_in_flight(user):
    user.execute()
    for free in ("nrt_destroy_tensor_set", "nrt_tensor_free"):
        thing = user.inputs if free == "nrt_destroy_tensor_set" else user.b
        user.library.functions[free](ctypes.byref(thing))
        said(user, f"{free}: a", "in flight")
    user.library.nrt_unload(user.model)
    said(user, "nrt_unload: a model of a request in flight")


def test_a_set_changed_in_flight(user):
    user.execute()
    user.library.nrt_add_tensor_to_tensor_set(user.inputs, b"x", user.b)
    said(user, "nrt_add_tensor_to_tensor_set: a set of a request in flight")


def test_a_tensor_freed_before_its_set(user):
    user.library.nrt_tensor_free(ctypes.byref(user.a))
    said(user, "a tensor of a tensor set that is still there")


def test_what_was_freed_is_known(user):
    stale = ctypes.c_void_p(user.b.value)
    user.library.nrt_destroy_tensor_set(ctypes.byref(user.outputs))
    user.library.nrt_tensor_free(ctypes.byref(user.b))
    assert user.read(stale)[0] == 3
    said(user, "an object that was freed")


def test_status_storage_is_one_request_s(user):
    if user.double.abi == "2.28":
        tracker = user.outcome()
        user.outcome = lambda: tracker
        user.execute()
        user.library.nrta_error_tracker_destroy(tracker)
        said(user, "a tracker of a request in flight")
        return
    with user.double.held(user.double.compute):
        shared = ctypes.c_int(-1)
        user.outcome = lambda: ctypes.byref(shared)
        user.execute()
        user.execute()
        said(user, "two requests in flight have one status storage")


def test_status_storage_reused_in_flight(user):
    if user.double.abi == "2.28":
        pytest.skip("its failures go to a tracker")
    with user.double.held(user.double.compute):
        user.execute()
        user.outcomes[-1].value = 12345
    user.finish(user.double.compute)
    said(user, "the status storage of a request in flight was reused")


def test_a_wrong_struct_size(user):
    version = Version()
    assert user.library.nrt_get_version(ctypes.byref(version), 8) == 2
    said(user, "nrt_get_version: a struct of 8 bytes, not 224")
    size = ctypes.c_size_t()
    assert user.library.nrt_get_vnc_memory_stats(0, MemoryStats(), 8, ctypes.byref(size)) == 2
    said(user, "nrt_get_vnc_memory_stats: a struct of 8 bytes")


def test_use_after_close_and_what_is_left(user):
    user.library.nrt_close()
    said(user, "nrt_close: a tensor is left")
    said(user, "nrt_close: a model is left")
    assert user.execute()[0] == 14 if user.double.abi != "2.28" else True
    assert user.library.nrt_unload(user.model) == 14
    said(user, "nrt_unload after nrt_close")


def test_close_in_flight(user):
    user.execute()
    user.library.nrt_close()
    said(user, "nrt_close with requests in flight")


def test_more_than_the_depth_is_refused_and_changes_nothing(user):
    user.double.set_depth(2)
    with user.double.held(user.double.compute):
        assert [user.execute()[0] for _ in range(4)] == [0, 0, 7, 7]
        assert user.double.count("full") == 2
    user.finish(user.double.compute, 2)
    status, sequence = user.execute()
    assert (status, sequence & NUMBER) == (0, 3)


def test_a_sequence_registered_twice(user):
    if user.double.abi == "2.29":
        pytest.skip("it has nothing to register")
    with user.double.held(user.double.compute):
        _, sequence = user.execute()
        for _ in range(2):
            if user.double.abi == "2.28":
                fd = ctypes.c_int()
                user.library.nrta_get_completion_handle(sequence, ctypes.byref(fd))
            else:
                user.library.nrta_event_register_seq_id_completion(sequence, 0)
        said(user, "a sequence registered twice")


def test_queues_registered_late_or_twice_or_left(user):
    if user.double.abi != "2.30":
        pytest.skip("it has no eventfds")
    register = user.library.nrta_event_register_xu_completion
    with user.double.held(user.double.compute):
        user.execute()
        register(0, user.double.compute, 0, 99)
        said(user, "is in use already")
    register(0, user.double.copy, 0, 99)
    register(0, user.double.copy, 0, 99)
    said(user, "registered twice")
    user.library.nrt_close()
    said(user, "an eventfd of unit 0 queue 0 is registered")


def test_a_queue_that_is_not_there_is_invalid(user):
    assert user.execute(queue=1)[0] == 2
    assert user.read(user.b, queue=2)[0] == 2


def test_an_unrecoverable_unit_ends_all_that_is_queued_unrun(user):
    with user.double.held(user.double.compute):
        user.double.fail(0, user.double.compute, 0, 1, 101)
        for _ in range(3):
            user.execute()
    user.finish(user.double.compute, 3)
    if user.double.abi != "2.28":
        assert [outcome.value for outcome in user.outcomes] == [0, 101, 101]
    assert user.execute()[0] == 101
