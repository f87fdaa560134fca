"""A compiler for models on a GPU, of the signature of `neuron_streams.compile`: CUDA graphs.

With it and `streams=torch.cuda` a model and the decode loop run with nothing of ours below them.
A graph reads and writes fixed addresses, so a call copies its inputs to where the graph looks for
them, replays it on the current stream and clones what it leaves. Tensors that it updates in place
are not copied: the graph is captured on them.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["GraphExecutable", "Inputs", "compile"]

Key: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
WARM_UP_RUNS = 3  # libraries choose their algorithms and allocate in the first ones
MOST_GRAPHS = 8


def compile(  # noqa: A001
    fn: Callable[..., Any],
    example_inputs: Mapping[str, Tensor] | Sequence[Tensor],
    /,
    *,
    mutates: Sequence[str] = (),
    name: str | None = None,
) -> GraphExecutable:
    """Make a function or module one launch on the current CUDA device.

    A module's parameters move to the device, once: executables that share some go on sharing them.
    The function must be fit for capture: it may neither wait for the device nor copy from the host.

    Args:
        fn: Takes and returns tensors; the results may be nested in tuples, lists and dicts.
        example_inputs: In the order of the parameters, or under their names; their shapes and
            dtypes are those of every call, and warming up reads their values.
        mutates: Names of the inputs that it updates in place, such as a KV cache. A call has them
            on the device. The graph is captured at the first call, and once more for each further
            set of them: they stay where they are in memory, and alive.
        name: For errors; the function's own when None.

    Raises:
        RuntimeError: torch sees no GPU.
        ValueError: `mutates` names what is not an input.

    Host: blocks while it warms up; so does the first call, to capture. Stream: later work of the
    current stream waits for the warming up. Source: torch.cuda.CUDAGraph.
    """
    name = str(name or getattr(fn, "__name__", type(fn).__name__))
    names, examples = _named(fn, example_inputs)
    if not torch.cuda.is_available():
        _check_mutates(name, names, mutates)
        raise RuntimeError(
            f"{name}: a CUDA graph needs a CUDA GPU, and torch sees none here; on other devices"
            " pass compile=neuron_streams.compile."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = Inputs(name, names, examples, mutates, device)
    if isinstance(fn, nn.Module):
        fn.to(device)
    return GraphExecutable(fn, inputs, examples)


class Inputs:
    """What an executable takes, and the complaints about what it is given.

    Raises:
        ValueError: `mutates` names what is not an input.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        examples: Sequence[Tensor],
        mutates: Sequence[str],
        device: torch.device,
    ) -> None:
        _check_mutates(name, names, mutates)
        self.name, self.device = name, device
        self.names = tuple(names)
        self.mutated = tuple(each in mutates for each in names)
        self.expected = tuple((example.dtype, example.shape) for example in examples)

    def check(self, given: Sequence[Tensor]) -> None:
        """Refuse what the graph would misread.

        Raises:
            TypeError: Too many, too few, or no tensors.
            ValueError: A dtype, a shape or a device that is another.
        """
        if len(given) != len(self.names):
            wanted = ", ".join(self.names)
            raise TypeError(
                f"{self.name} takes {len(self.names)} tensors ({wanted}), and {len(given)} were"
                " given."
            )
        for tensor, expected, mutated, name in zip(
            given, self.expected, self.mutated, self.names, strict=True
        ):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.name}: {name} is {type(tensor).__name__}, not a tensor.")
            if (tensor.dtype, tensor.shape) != expected:
                raise ValueError(
                    f"{self.name}: {name} is {_described(tensor.dtype, tensor.shape)}, and was"
                    f" compiled for {_described(*expected)}; pad or convert it, or compile again."
                )
            self._check_device(tensor, mutated, name)

    def key_of(self, given: Sequence[Tensor]) -> Key:
        """Where the tensors that are updated in place lie."""
        return tuple(
            (tensor.data_ptr(), tensor.stride())
            for tensor, mutated in zip(given, self.mutated, strict=True)
            if mutated
        )

    def _check_device(self, tensor: Tensor, mutated: bool, name: str) -> None:
        if tensor.device == self.device:
            return
        if mutated:
            raise ValueError(
                f"{self.name}: {name} is updated in place and is on {tensor.device}; move it to"
                f" {self.device} once, and pass what that gives at each call."
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{self.name}: {name} is on {tensor.device}; it has to be on {self.device} or on"
                " the host."
            )


class _Pool:
    """What the graphs of a device share: memory for what they compute, and their order.

    They run one behind another, on whatever streams: each waits for the one before, so that no two
    of them use that memory, or the same inputs, at a time.
    """

    _of_device: weakref.WeakValueDictionary[int, _Pool] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.replayed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.lock = threading.Lock()
        # The allocator forgets a pool with its last graph, and then refuses its handle.
        self.first_graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(cls, device: torch.device) -> _Pool:
        assert device.index is not None
        found = cls._of_device.get(device.index)
        if found is None:
            found = cls._of_device[device.index] = cls(device)
        return found


class GraphExecutable:
    """A function that runs as one launch; made by `compile`.

    Calling it takes host tensors, or tensors of its device, which must be ready for the current
    stream as for any kernel. It returns fresh tensors that no later call writes to.
    """

    def __init__(self, fn: Callable[..., Any], inputs: Inputs, examples: Sequence[Tensor]) -> None:
        self.name = inputs.name
        self._fn, self._inputs = fn, inputs
        with torch.cuda.device(inputs.device), torch.no_grad():
            self._pool = _Pool.of(inputs.device)
            self._static = [
                None if mutated else example.to(inputs.device, copy=True)
                for example, mutated in zip(examples, inputs.mutated, strict=True)
            ]
            self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Any]] = {}
            self._warm_up(examples)

    def __call__(self, *given: Tensor) -> Any:
        """Host: returns at once, but for the first call. Stream: runs the graph.

        Raises:
            TypeError, ValueError: What is given is not what it was compiled for.
        """
        self._inputs.check(given)
        with self._pool.lock, torch.cuda.device(self._inputs.device), torch.no_grad():
            stream = torch.cuda.current_stream()
            graph, results = self._graph_on(given)
            stream.wait_event(self._pool.replayed)
            for tensor, static in zip(given, self._static, strict=True):
                if static is not None:
                    _copy(tensor, static, stream)
            graph.replay()
            fresh = pytree.tree_map(torch.clone, results)
            self._pool.replayed.record(stream)
        return fresh

    def _graph_on(self, given: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Any]:
        key = self._inputs.key_of(given)
        found = self._graphs.get(key)
        if found is None:
            if len(self._graphs) == MOST_GRAPHS:
                self._pool.replayed.synchronize()
                self._graphs.pop(next(iter(self._graphs)))
            found = self._graphs[key] = self._capture(given)
        return found

    def _capture(self, given: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for their events meanwhile, which "global" would not let them.
        with torch.cuda.graph(
            graph,
            pool=self._pool.handle,
            stream=self._pool.stream,
            capture_error_mode="thread_local",
        ):
            results = self._fn(*self._arguments(given))
        self._pool.first_graph = self._pool.first_graph or graph
        return graph, results

    def _arguments(self, mutated: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the graph; of `mutated` those that the function updates in place."""
        pairs = zip(self._static, mutated, strict=True)
        return [tensor if static is None else static for static, tensor in pairs]

    def _warm_up(self, examples: Sequence[Tensor]) -> None:
        """Run on copies of the examples, since the run is real and updates them."""
        current, side = torch.cuda.current_stream(), self._pool.stream
        side.wait_stream(current)
        side.wait_event(self._pool.replayed)
        with torch.cuda.stream(side):
            arguments = self._arguments([example.to(side.device) for example in examples])
            for _ in range(WARM_UP_RUNS):
                results = self._fn(*arguments)
        current.wait_stream(side)
        for leaf in pytree.tree_leaves(results):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.name} returns {type(leaf).__name__}; a graph can only give tensors."
                )


def _copy(tensor: Tensor, static: Tensor, stream: torch.cuda.Stream) -> None:
    """Bring an input to where the graph looks for it. Host: never waits for the device.

    A host tensor goes by fresh pinned memory: the caller may write over its own at once, and
    torch's allocator gives the pinned block to nobody before the copy has run.
    """
    static.record_stream(stream)
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
        static.copy_(tensor)
        return
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    static.copy_(staged.copy_(tensor), non_blocking=True)


def _named(
    fn: Callable[..., Any], examples: Mapping[str, Tensor] | Sequence[Tensor]
) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(examples, Mapping):
        return tuple(examples), tuple(examples.values())
    called = fn.forward if isinstance(fn, nn.Module) else fn
    names = tuple(inspect.signature(called).parameters)[: len(examples)]
    return names, tuple(examples)


def _check_mutates(name: str, names: Sequence[str], mutates: Sequence[str]) -> None:
    unknown = sorted(set(mutates) - set(names))
    if unknown:
        raise ValueError(
            f"{name}: mutates names {', '.join(unknown)}, and the inputs are {', '.join(names)};"
            " name those that are updated in place."
        )


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
