"""What the programs name of `torch.cuda`, where everything has happened when a call returns.

The CPU's own result is what a ported program is compared with; this module is how the same text
runs there.
"""

import contextlib

import torch
import torch.distributed.fsdp
from torch.amp import GradScaler as _GradScaler


class Event:
    def __init__(self, enable_timing=False, blocking=False):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.0


class Stream(contextlib.AbstractContextManager):
    __hash__ = object.__hash__

    def __init__(self, device=None, priority=0):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream)

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True

    def synchronize(self):
        pass

    def __exit__(self, *exception):
        pass


class amp:
    @staticmethod
    def GradScaler(**options):
        return _GradScaler("cpu", **options)


_default = Stream()


def current_stream(device=None):
    return _default


def default_stream(device=None):
    return _default


def stream(stream):
    return contextlib.nullcontext()


def device(device):
    return contextlib.nullcontext()


def set_stream(stream):
    pass


def set_device(device):
    pass


def synchronize(device=None):
    pass


def empty_cache():
    pass


def is_available():
    return True


def device_count():
    return 2


def manual_seed_all(seed):
    torch.manual_seed(seed)


class FullyShardedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Torch's own refuses the CPU; unsharded training has the same numbers."""

    def __init__(self, module, sharding_strategy=None, auto_wrap_policy=None):
        super().__init__(module)

    @staticmethod
    def summon_full_params(module):
        return contextlib.nullcontext()


torch.distributed.fsdp.FullyShardedDataParallel = FullyShardedDataParallel
torch.Stream = Stream
torch.nn.Module.cuda = lambda self, device=None: self
torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.clone()
torch.Tensor.record_stream = lambda self, stream: None
torch.Tensor.pin_memory = lambda self: self
