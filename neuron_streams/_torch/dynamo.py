"""torch.compile: keep Dynamo out of this package, and from dropping `with stream:` silently.

Dynamo takes any torch.Stream for one of its own: it traces into these functions, and compiles
`with s:` to nothing. Both are mended when its modules are loaded, which may be long after the first
use of this package, so an import hook waits for them. Every private name is looked for first;
where one is missing, torch.compile does what it does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

__all__ = ["prepare"]

Hook = Callable[[Any], None]


def prepare() -> None:
    """Mend Dynamo's modules where they are loaded, else when they are. Host: imports nothing."""
    for name in list(_hooks):
        loaded = sys.modules.get(name)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            _hooks.pop(name)(loaded)
    if _hooks and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _stay_out(trace_rules: Any) -> None:
    """Have calls of this package break the graph and run as they are."""
    add = getattr(trace_rules, "add", None)
    if add is not None:
        add("neuron_streams")


def _refuse_to_drop(streams: Any) -> None:
    """Have `with s:` over one of our streams break the graph, so that it happens; warn once."""
    variable = getattr(streams, "StreamVariable", None)
    enter = getattr(variable, "enter", None)
    if variable is None or enter is None:
        return

    def entered(self: Any, tx: Any, *args: Any) -> Any:
        stream = getattr(self, "value", None)
        if isinstance(stream, torch.Stream) and stream.device.type == "neuron":
            _warn_once()
            _break_graph()
        return enter(self, tx, *args)

    variable.enter = entered


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "torch.compile met `with s:` over a neuron_streams stream, which Dynamo would drop "
            "silently; write `with neuron_streams.stream(s):`, which runs as it stands",
            stacklevel=2,
        )


def _break_graph() -> None:
    from torch._dynamo.exc import Unsupported

    raise Unsupported("entering a neuron_streams stream is no graph operation")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: runs a hook behind the loading of the modules that wait for one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = _hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then(spec.loader.exec_module, hook)  # type: ignore[assignment,method-assign]
        return spec


def _then(execute: Callable[[ModuleType], None], hook: Hook) -> Callable[[ModuleType], None]:
    def execute_and_mend(module: ModuleType) -> None:
        execute(module)
        hook(module)

    return execute_and_mend


_hooks: dict[str, Hook] = {
    "torch._dynamo.trace_rules": _stay_out,
    "torch._dynamo.variables.streams": _refuse_to_drop,
}
