"""The structs of libnrt's public headers that this package passes, as ctypes.

Sizes and offsets are those of x86-64 and of arm64 alike (LP64).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_size_t, c_uint32, c_uint64

__all__ = ["ErrorRecord", "InstanceInfo", "MemoryStats", "TensorInfo", "TensorInfos", "Version"]


class TensorInfo(ctypes.Structure):
    """nrt_tensor_info_t: a tensor that a model takes or makes."""

    _fields_ = [
        ("name", c_char * 256),
        ("usage", c_int),
        ("size", c_size_t),
        ("dtype", c_int),
        ("shape", ctypes.POINTER(c_uint32)),
        ("ndim", c_uint32),
    ]


class TensorInfos(ctypes.Structure):
    """nrt_tensor_info_array_t: a count, and as many infos behind it."""

    _fields_ = [("tensor_count", c_uint64), ("tensor_array", TensorInfo * 0)]


class MemoryStats(ctypes.Structure):
    """nrt_vnc_memory_stats_t."""

    _fields_ = [("bytes_used", c_size_t), ("bytes_limit", c_size_t)]


class Version(ctypes.Structure):
    """nrt_version_t."""

    _fields_ = [
        ("rt_major", c_uint64),
        ("rt_minor", c_uint64),
        ("rt_patch", c_uint64),
        ("rt_maintenance", c_uint64),
        ("rt_detail", c_char * 128),
        ("git_hash", c_char * 64),
    ]

    def __str__(self) -> str:
        parts = (self.rt_major, self.rt_minor, self.rt_patch, self.rt_maintenance)
        return ".".join(map(str, parts))


class InstanceInfo(ctypes.Structure):
    """nrt_instance_info_t: the machine."""

    _fields_ = [
        ("family", c_uint32),
        ("size", c_uint32),
        ("arch_name", c_char * 16),
        ("device_revision", c_char * 8),
    ]


class ErrorRecord(ctypes.Structure):
    """nrta_error_t of SDK 2.28: which sequence failed, and how."""

    _fields_ = [("seq_id", c_uint64), ("error_code", c_uint64)]
