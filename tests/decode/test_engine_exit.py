"""The engine at the interpreter's end: it works for the threads that outlive the main thread."""

from __future__ import annotations

import pytest

from tests.torch_backend import children

PRELUDE = """
import threading, time
import torch
import neuron_streams
from neuron_streams.decode import DecodeEngine, DecodeLoop
from neuron_streams.testing import Gate
from tests.decode.engines import limited, make_engine, oracle
from tests.decode.hash_model import Sizes

def read(stream):
    try:
        print(list(stream.result().new_token_ids) == oracle([1], limited(20)), flush=True)
    except RuntimeError as error:
        print(error, flush=True)

def read_later(stream):
    def later():
        threading.main_thread().join()
        read(stream)
    threading.Thread(target=later).start()
"""
IN_VAIN = (
    "The main thread has ended, request 'a' is paused or the device held up, and no thread is left "
    "that could change that; the wait is given up so that the process can end.\n"
)

# At work for ever, by itself: that keeps nothing.
BUSY = """
engine, _, _ = make_engine(thread=True)
working = threading.Event()
def again(output=None, count=iter(range(10**9))):
    if output is None or output.finished:
        number = next(count)
        engine.add_request(str(number), [1, 2], limited(20), on_output=again)
        if number > 100:
            working.set()
for _ in range(3):
    again()
"""
SCRIPTS: dict[str, tuple[str, str]] = {
    "nothing is left but the engine": (BUSY + "working.wait()", ""),
    "a reader goes on": (BUSY + "read_later(engine.add_request('a', [1], limited(20)))", "True\n"),
    "an exit function goes on": (
        BUSY
        + """
import atexit
atexit.register(lambda: read(engine.add_request("a", [1], limited(20))))
""",
        "True\n",
    ),
    "nobody resumes what a reader waits for": (
        BUSY
        + """
stream = engine.add_request("a", [1], limited(20))
engine.pause("a")
working.wait()
read_later(stream)
""",
        IN_VAIN,
    ),
    "a thread resumes what another waits for": (
        BUSY
        + """
stream = engine.add_request("a", [1], limited(20))
engine.pause("a")
def resume():
    time.sleep(1.0)
    engine.resume("a")
read_later(stream)
threading.Thread(target=resume).start()
""",
        "True\n",
    ),
    "the engine's thread is in the middle of something long": (
        """
engine, _, _ = make_engine(thread=True)
inside = threading.Event()
def stay(_):
    inside.set()
    while True:
        torch.ones(3).tolist()
engine.add_request("a", [1], limited(20), on_output=stay)
inside.wait()
""",
        "",
    ),
    "nobody opens the gate that the device waits for": (
        """
neuron_streams.init()
class Threes(Sizes):
    def prefill(self, input_ids, *_):
        return torch.full(input_ids.shape[:1], 3, dtype=torch.int32).to("neuron")
    decode = prefill
neuron_streams._exit.PATIENCE_SECONDS = 0.2
model = Threes()
model.device = torch.device("neuron")
engine = DecodeEngine(DecodeLoop(model))
gate = Gate()
read_later(engine.add_request("a", [1], limited(20)))
""",
        IN_VAIN,
    ),
}


@pytest.fixture(scope="module")
def ended() -> dict[str, children.Ended]:
    return children.run({name: code for name, (code, _) in SCRIPTS.items()}, PRELUDE, 20.0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_process_ends(ended: dict[str, children.Ended], name: str) -> None:
    assert str(ended[name]) == "0: " + SCRIPTS[name][1]
