"""One entry of PyTorch's operator database, on the CPU and on the device."""

import dataclasses
import itertools
import re
import warnings

import torch
from torch.testing._internal import common_methods_invocations as database

from tests.torch_backend.comparing import aliases, difference
from tests.torch_backend.device import DEVICE, drain, synchronize
from tests.torch_backend.exceptions import HOST_ARGUMENTS, LATE, UNDEFINED, WAITING
from tests.torch_backend.placing import Placing, tensors
from tests.torch_backend.watchdog import Watchdog

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)
SAMPLES = 3
# The database seeds its random operators and puts the state back, which hides that they are random.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
KINDS = ("forward", "inplace", "out", "gradient", "error")


@dataclasses.dataclass(frozen=True)
class Failure:
    op: str
    dtype: str
    kind: str
    sample: int
    message: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call gave: a value or an error, and what it did to its inputs."""

    value: object = None
    error: Exception | None = None
    inputs: tuple = ()
    random: bool = False


def forward(op, sample):
    args = sample.args
    if op.full_name in HOST_ARGUMENTS:
        args = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    return op(sample.input, *args, **sample.kwargs)


def inplace(op, sample):
    return op.get_inplace()(sample.input, *sample.args, **sample.kwargs)


def out(op, sample):
    return op(sample.input, *sample.args, **sample.kwargs)


def gradient(op, sample, seeds):
    value = sample.output_process_fn_grad(forward(op, sample))
    outputs = [x for x in tensors(value) if x.requires_grad]
    inputs = [x for x in tensors(arguments(sample)) if x.requires_grad]
    seeds = seeds(outputs)
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True) if outputs else ()


def arguments(sample):
    return sample.input, tuple(sample.args), dict(sample.kwargs)


def attempt(call, sample):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    try:
        value, error = call(sample), None
    except Exception as raised:
        value, error = None, raised
    random = not torch.equal(before, torch.get_rng_state())
    return Outcome(value, error, arguments(sample), random)


class Checks:
    """Runs the samples of the database; gives the failures of one operator, dtype and kind."""

    def __init__(self):
        self._watchdog = Watchdog()
        self.calls = 0

    def run(self, op, dtype, kind):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drain()
            failures = []
            try:
                failures.extend(getattr(self, "_" + kind)(op, dtype))
            except Exception as error:
                text = f"the test itself raises {_first_line(error)}"
                failures.append(Failure(op.full_name, _name(dtype), kind, -1, text))
            return failures

    def _forward(self, op, dtype):
        with torch.no_grad():
            for i, sample in self._samples(op, dtype):
                yield from self._compare(op, dtype, "forward", i, sample, lambda s: forward(op, s))

    def _inplace(self, op, dtype):
        if op.get_inplace() is None:
            return
        with torch.no_grad():
            for i, sample in self._samples(op, dtype):
                if not sample.broadcasts_input:
                    yield from self._compare(
                        op, dtype, "inplace", i, sample, lambda s: inplace(op, s)
                    )

    def _out(self, op, dtype):
        if not op.supports_out:
            return
        with torch.no_grad():
            for i, sample in self._samples(op, dtype):
                first = attempt(lambda s: forward(op, s), Placing("cpu").sample(sample))
                if first.error is not None or not _can_be_out(first.value):
                    continue
                sample.kwargs["out"] = _out_like(first.value, resized=i == 0)
                yield from self._compare(op, dtype, "out", i, sample, lambda s: forward(op, s))

    def _gradient(self, op, dtype):
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu"):
            return
        for i, sample in self._samples(op, dtype, requires_grad=True):
            seeds = []

            def remember(outputs, seeds=seeds):
                seeds.extend(map(_seed, outputs))
                return seeds

            expected = attempt(
                lambda s, seeds=remember: gradient(op, s, seeds), Placing("cpu").sample(sample)
            )
            if expected.error is not None:
                continue
            moved = Placing(DEVICE)(seeds)
            yield from self._against(
                expected,
                op,
                dtype,
                "gradient",
                i,
                sample,
                lambda s, moved=moved: gradient(op, s, lambda _: moved),
            )

    def _error(self, op, dtype):
        if dtype is not torch.float32 or op.error_inputs_func is None:
            return
        with torch.no_grad():
            for i, wrong in enumerate(op.error_inputs("cpu")):
                expected = attempt(
                    lambda s: forward(op, s), Placing("cpu").sample(wrong.sample_input)
                )
                if expected.error is not None:
                    yield from self._against(
                        expected,
                        op,
                        dtype,
                        "error",
                        i,
                        wrong.sample_input,
                        lambda s: forward(op, s),
                    )

    def _samples(self, op, dtype, requires_grad=False):
        if dtype not in op.supported_dtypes("cpu"):
            return
        torch.manual_seed(1)
        samples = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        yield from enumerate(itertools.islice(samples, SAMPLES))

    def _compare(self, op, dtype, kind, i, sample, call):
        expected = attempt(call, Placing("cpu").sample(sample))
        if not (kind == "forward" and isinstance(expected.error, NotImplementedError)):
            yield from self._against(expected, op, dtype, kind, i, sample, call)

    def _against(self, expected, op, dtype, kind, i, sample, call):
        self.calls += 1
        waited = False
        placed = Placing(DEVICE).sample(sample)
        if op.full_name in WAITING or kind == "error":
            actual = attempt(call, placed)
            if expected.error is not None and re.search(LATE, str(expected.error)):
                actual = _read(actual)
        else:
            with self._watchdog.held():
                actual = attempt(call, placed)
            waited = self._watchdog.waited
        contents = not expected.random and op.full_name not in UNDEFINED
        message = _message(expected, actual, contents)
        for text in filter(None, ["waits for the stream" if waited else None, message]):
            yield Failure(op.full_name, _name(dtype), kind, i, text)


def _read(outcome):
    """The outcome once the device has got there: its error may come with the value."""
    try:
        synchronize()
    except Exception as error:
        return dataclasses.replace(outcome, error=outcome.error or error)
    return outcome


def _message(expected, actual, contents):
    if expected.error is not None:
        if actual.error is None:
            return f"accepts what the CPU refuses: {_first_line(expected.error)}"
        if type(actual.error) is not type(expected.error):
            return f"raises {_first_line(actual.error)} | CPU: {_first_line(expected.error)}"
        return None
    if actual.error is not None:
        return f"raises {_first_line(actual.error)}"
    try:
        why = difference(expected.value, actual.value, DEVICE, contents)
        if why:
            return why
        why = difference(expected.inputs, actual.inputs, DEVICE, contents)
        if why:
            return f"an input afterwards: {why}"
    except Exception as error:  # a poisoned result
        return f"reading raises {_first_line(error)}"
    shared = [aliases(x.value, tensors(x.inputs)) for x in (expected, actual)]
    return None if shared[0] == shared[1] else f"shares {shared[1]}, on the CPU {shared[0]}"


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _first_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _can_be_out(value):
    parts = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(x, torch.Tensor) and x.layout is torch.strided for x in parts)


def _out_like(value, resized):
    def like(x):
        return x.new_empty(0) if resized else torch.empty_like(x).zero_()

    return like(value) if isinstance(value, torch.Tensor) else tuple(map(like, value))


@torch.no_grad()
def _seed(output):
    """A gradient that is not the same everywhere, with the layout of its output."""
    if output.layout is not torch.strided or output.is_nested:
        return torch.ones_like(output)
    values = torch.linspace(-1, 2, output.numel()).reshape(output.shape).to(output.dtype)
    return torch.empty_like(output).copy_(values)
