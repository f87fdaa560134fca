"""The rows of `surface`: (name, class, signature of torch, note), in the order of torch's docs.

Taken from torch 2.13: the documentation and `__all__` of a CUDA build, signatures without
annotations. A file of its own because it is data, and long.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = [
    "ACCELERATOR",
    "ADDED",
    "AMP",
    "CLASSES",
    "COMM",
    "CUDA",
    "EVENT",
    "NEURON",
    "NVTX",
    "OUTSIDE",
    "STREAM",
]

_Kind: TypeAlias = Literal["match", "modified", "mismatch", "absent", "added"]
_Rows: TypeAlias = tuple[tuple[str, _Kind, str, str], ...]

_GRAPHS = (
    "There is no capture: compile the step with neuron_streams.compile(), which is one command."
)
_POOLS = "There is no caching allocator to configure; device memory is freed with its last user."
_MONITOR = "Use neuron-top or neuron-monitor on the machine."
_CACHED = "Renamed in torch long ago; use {}."
_RAW = "Use torch.empty(..., device='neuron')."
_GREEN = "Use NeuronStream(priority=...): the cores of a device cannot be divided."
_WITHOUT_WARNING = "torch.amp's for the device, without the warning of torch.cuda.amp."
_AT_ONCE = "Plain copies on the current streams: buffer_size changes nothing."
_ANNOTATION = "An annotation of torch.profiler, and a span of the decode loop's trace."

# fmt: off
CUDA: _Rows = (
    ("Stream", "modified", "(device=None, priority=0, **kwargs)",
     "Never aliased, where torch hands 32 out in turn; also called NeuronStream."),
    ("ExternalStream", "modified", "(stream_ptr, device=None, **kwargs)",
     "The handle is that of a runtime lane (`native_handle`), and must be alive."),
    ("Event", "modified",
     "(enable_timing=False, blocking=False, interprocess=False, external=False)",
     "interprocess=True is refused; blocking and external change nothing."),
    ("StreamContext", "modified", "(stream)",
     "May be entered again, nested, and by several threads."),
    ("stream", "match", "(stream)", ""),
    ("current_stream", "modified", "(device=None)", "Gives the same object each time."),
    ("default_stream", "modified", "(device=None)", "Gives the same object each time."),
    ("set_stream", "match", "(stream)", ""),
    ("get_stream_from_external", "match", "(data_ptr, device=None)", ""),
    ("synchronize", "modified", "(device=None)",
     "Raises the failures of the device's commands, each once."),
    ("current_device", "match", "()", ""),
    ("device", "match", "(device)", ""),
    ("device_count", "modified", "()",
     "Where the CPU plays the device: 2, or NEURON_STREAMS_DEVICE_COUNT."),
    ("device_of", "match", "(obj)", ""),
    ("set_device", "match", "(device)", ""),
    ("can_device_access_peer", "match", "(device, peer_device)", ""),
    ("get_device_capability", "mismatch", "(device=None)",
     "(0, 0): NeuronCore versions are no compute capabilities."),
    ("get_device_name", "match", "(device=None)", ""),
    ("get_device_properties", "modified", "(device=None)",
     "name, total_memory and multi_processor_count only."),
    ("init", "modified", "()", "Takes runtime=, to choose who plays the device."),
    ("is_available", "modified", "()",
     "True, since the CPU plays the device where none is; False where another package has it."),
    ("is_initialized", "match", "()", ""),
    ("is_bf16_supported", "match", "(including_emulation=True)", ""),
    ("get_sync_debug_mode", "match", "()", ""),
    ("set_sync_debug_mode", "match", "(debug_mode)", ""),
    ("is_current_stream_capturing", "modified", "()", "Always False."),
    ("manual_seed", "match", "(seed)", ""),
    ("manual_seed_all", "match", "(seed)", ""),
    ("seed", "match", "()", ""),
    ("seed_all", "match", "()", ""),
    ("initial_seed", "match", "()", ""),
    ("get_rng_state", "modified", "(device='cuda')",
     "The default is the current device, too: None."),
    ("get_rng_state_all", "match", "()", ""),
    ("set_rng_state", "modified", "(new_state, device='cuda')",
     "The default is the current device, too: None."),
    ("set_rng_state_all", "match", "(new_states)", ""),
    ("default_generators", "modified", "", "Looked up at each use."),
    ("amp", "match", "", ""),
    ("comm", "match", "", ""),
    ("nvtx", "match", "", ""),
    ("random", "match", "", ""),
    ("memory_allocated", "modified", "(device=None)", "Counts live buffers, unrounded."),
    ("max_memory_allocated", "modified", "(device=None)", "Counts live buffers, unrounded."),
    ("memory_reserved", "modified", "(device=None)",
     "Where the CPU plays the device the same as memory_allocated: no cache."),
    ("max_memory_reserved", "modified", "(device=None)", "As memory_reserved."),
    ("memory_stats", "modified", "(device=None)",
     "allocation, allocated_bytes, the same as active and requested; reserved; all pools."),
    ("memory_stats_as_nested_dict", "modified", "(device=None)", "As memory_stats."),
    ("memory_summary", "modified", "(device=None, abbreviated=False)", "As memory_stats."),
    ("reset_peak_memory_stats", "match", "(device=None)", ""),
    ("reset_accumulated_memory_stats", "match", "(device=None)", ""),
    ("reset_max_memory_allocated", "match", "(device=None)", ""),
    ("empty_cache", "modified", "()",
     "Where the CPU plays the device nothing is cached, so nothing is released."),
    ("mem_get_info", "modified", "(device=None)",
     "Of the host's memory where the CPU plays the device."),
    ("host_memory_stats", "modified", "()", "Counts pinned memory: allocation, allocated_bytes."),
    ("host_memory_stats_as_nested_dict", "modified", "()", "As host_memory_stats."),
    ("reset_peak_host_memory_stats", "match", "()", ""),
    ("reset_accumulated_host_memory_stats", "match", "()", ""),
    ("get_per_process_memory_fraction", "match", "(device=None)", ""),
    ("set_per_process_memory_fraction", "modified", "(fraction, device=None)",
     "Of the host's memory where the CPU plays the device, or of NEURON_STREAMS_MEMORY."),
    ("get_allocator_backend", "absent", "()", _POOLS),
    ("memory_snapshot", "absent", "(mempool_id=None, include_traces=True)",
     "Use memory_stats(), and testing.EmulatedRuntime's busy_intervals() for what ran."),
    ("memory_cached", "absent", "(device=None)", _CACHED.format("memory_reserved()")),
    ("max_memory_cached", "absent", "(device=None)", _CACHED.format("max_memory_reserved()")),
    ("reset_max_memory_cached", "absent", "(device=None)",
     _CACHED.format("reset_peak_memory_stats()")),
    ("caching_allocator_alloc", "absent", "(size, device=None, stream=None)", _RAW),
    ("caching_allocator_delete", "absent", "(mem_ptr)", "Delete the tensor."),
    ("caching_allocator_enable", "absent", "(value=True)", _POOLS),
    ("caching_allocator_disabled", "absent", "()", _POOLS),
    ("change_current_allocator", "absent", "(allocator)", _POOLS),
    ("CUDAPluggableAllocator", "absent", "(path_to_so_file, alloc_fn_name, free_fn_name)", _POOLS),
    ("MemPool", "absent", "(allocator=None, use_on_oom=False, no_split=False)", _POOLS),
    ("use_mem_pool", "absent", "(pool, device=None)", _POOLS),
    ("ipc_collect", "absent", "()", "No memory is shared between processes; nothing to collect."),
    ("CUDAGraph", "absent", "(keep_graph=False)", _GRAPHS),
    ("graph", "absent",
     "(cuda_graph, pool=None, stream=None, capture_error_mode='global', "
     "enable_annotations=False, check_input_liveness=False)",
     _GRAPHS),
    ("graphs", "absent", "", _GRAPHS),
    ("graph_pool_handle", "absent", "()", _GRAPHS),
    ("make_graphed_callables", "absent",
     "(callables, sample_args, num_warmup_iters=3, allow_unused_input=False, pool=None)",
     _GRAPHS),
    ("GreenContext", "absent", "()", _GREEN),
    ("cudart", "absent", "()", "There is no CUDA runtime; streams and events cover its use here."),
    ("cudaStatus", "absent", "()", "Failures are exceptions; there is no status to compare."),
    ("check_error", "modified", "(res)", "0 is success; no function here returns anything else."),
    ("CudaError", "modified", "(code)", "Raised by check_error only; failures are what they are."),
    ("DeferredCudaCallError", "modified", "", "Raised by nothing."),
    ("AcceleratorError", "modified", "", "torch's; a failure raises what the command raised."),
    ("OutOfMemoryError", "match", "", ""),
    ("clock_rate", "absent", "(device=None)", _MONITOR),
    ("device_memory_used", "absent", "(device=None)", "Use mem_get_info()."),
    ("list_gpu_processes", "absent", "(device=None)", _MONITOR),
    ("memory_usage", "absent", "(device=None)", "Use mem_get_info()."),
    ("power_draw", "absent", "(device=None)", _MONITOR),
    ("temperature", "absent", "(device=None)", _MONITOR),
    ("utilization", "absent", "(device=None)", _MONITOR),
    ("memory", "match", "", ""),
    ("streams", "match", "", ""),
    ("_DeviceGuard", "match", "(index)", ""),
    ("_exchange_device", "match", "(device)", ""),
    ("_maybe_exchange_device", "match", "(device)", ""),
    ("_set_stream_by_id", "match", "(stream_id, device_index, device_type)", ""),
    ("_sleep", "modified", "(cycles)", "Nanoseconds, where torch counts clocks of the GPU."),
    ("_is_in_bad_fork", "match", "()", ""),
    ("_lazy_init", "match", "()", ""),
    ("_lazy_call", "modified", "(callable, **kwargs)", "seed= and seed_all= change nothing."),
)

STREAM: _Rows = (
    ("priority_range", "match", "()", ""),
    ("priority", "match", "", ""),
    ("query", "match", "(self)", ""),
    ("synchronize", "modified", "(self)", "Raises the stream's failures, each once."),
    ("wait_event", "match", "(self, event)", ""),
    ("wait_stream", "match", "(self, stream)", ""),
    ("record_event", "match", "(self, event=None)", ""),
    ("is_capturing", "modified", "(self)", "Always False."),
    ("device", "match", "", ""),
    ("device_index", "match", "", ""),
    ("device_type", "modified", "", "20, PrivateUse1."),
    ("stream_id", "match", "", ""),
    ("native_handle", "modified", "", "A number for `ExternalStream`, no pointer."),
    ("cuda_stream", "modified", "", "The native_handle, which is no pointer."),
    ("_as_parameter_", "modified", "", "The native_handle, which C must not take for a pointer."),
    ("__cuda_stream__", "modified", "(self)",
     "Raises UnsupportedError: who calls it takes the answer for a cudaStream_t."),
    ("__eq__", "modified", "(self, o)", "`!=` and `<` as fixed in torch after 2.13."),
    ("__hash__", "match", "(self)", ""),
    ("__enter__", "modified", "(self)", "Safe when threads share the object; see torch.compile."),
)

EVENT: _Rows = (
    ("record", "match", "(self, stream=None)", ""),
    ("wait", "match", "(self, stream=None)", ""),
    ("query", "match", "(self)", ""),
    ("synchronize", "modified", "(self)",
     "Raises failures before the record, once; always sleeps, as with blocking=True."),
    ("elapsed_time", "match", "(self, end_event)", ""),
    ("device", "match", "", ""),
    ("event_id", "match", "", ""),
    ("cuda_event", "modified", "", "The event_id: 0 before the first record, and no pointer."),
    ("_as_parameter_", "modified", "", "The event_id, which C must not take for a pointer."),
    ("ipc_handle", "absent", "(self)",
     "Synchronize the event, then send the data with torch.multiprocessing."),
    ("from_ipc_handle", "absent", "(device, handle)",
     "Synchronize the event, then send the data with torch.multiprocessing."),
)

AMP: _Rows = (
    ("autocast", "modified", "(enabled=True, dtype=torch.float16, cache_enabled=True)",
     _WITHOUT_WARNING),
    ("GradScaler", "modified",
     "(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, "
     "enabled=True)",
     _WITHOUT_WARNING),
    ("custom_fwd", "modified", "(fwd=None, *, cast_inputs=None)", _WITHOUT_WARNING),
    ("custom_bwd", "modified", "(bwd)", _WITHOUT_WARNING),
    ("amp_definitely_not_available", "match", "()", ""),
)

COMM: _Rows = (
    ("broadcast", "match", "(tensor, devices=None, *, out=None)", ""),
    ("broadcast_coalesced", "modified", "(tensors, devices, buffer_size=10485760)", _AT_ONCE),
    ("reduce_add", "match", "(inputs, destination=None)", ""),
    ("reduce_add_coalesced", "modified", "(inputs, destination=None, buffer_size=10485760)",
     _AT_ONCE),
    ("scatter", "match",
     "(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None)", ""),
    ("gather", "match", "(tensors, dim=0, destination=None, *, out=None)", ""),
)

NVTX: _Rows = (
    ("range_push", "modified", "(msg)", _ANNOTATION),
    ("range_pop", "modified", "()", "As range_push; -1 without a range."),
    ("range_start", "modified", "(msg)", _ANNOTATION),
    ("range_end", "modified", "(range_id)", "As range_start."),
    ("mark", "modified", "(msg)", "As range_push, without a length."),
    ("range", "modified", "(msg, *args, **kwargs)", _ANNOTATION),
)

ACCELERATOR: _Rows = (
    ("current_accelerator", "match", "(check_available=False)", ""),
    ("is_available", "match", "()", ""),
    ("device_count", "match", "()", ""),
    ("current_device_index", "match", "()", ""),
    ("current_device_idx", "match", "()", ""),
    ("set_device_index", "match", "(device, /)", ""),
    ("set_device_idx", "match", "(device, /)", ""),
    ("device_index", "match", "(device, /)", ""),
    ("get_device_capability", "absent", "(device=None, /)",
     "torch raises; use neuron_streams.get_device_properties()."),
    ("current_stream", "match", "(device=None, /)", ""),
    ("set_stream", "match", "(stream)", ""),
    ("synchronize", "match", "(device=None, /)", ""),
    ("empty_cache", "match", "()", ""),
    ("empty_host_cache", "match", "()", ""),
    ("get_memory_info", "match", "(device_index=None, /)", ""),
    ("max_memory_allocated", "match", "(device_index=None, /)", ""),
    ("max_memory_reserved", "match", "(device_index=None, /)", ""),
    ("memory_allocated", "match", "(device_index=None, /)", ""),
    ("memory_reserved", "match", "(device_index=None, /)", ""),
    ("memory_stats", "match", "(device_index=None, /)", ""),
    ("reset_accumulated_memory_stats", "match", "(device_index=None, /)", ""),
    ("reset_peak_memory_stats", "match", "(device_index=None, /)", ""),
    ("Graph", "absent", "(keep_graph=False, *, pool=None, capture_error_mode='default')",
     "torch raises. " + _GRAPHS),
)

# What the native module is known to have; the modules of neuron_streams are spelled the same.
NEURON: _Rows = (
    ("Stream", "match", "", ""),
    ("Event", "modified", "", "elapsed_time from completion, where the native one takes record()."),
    ("stream", "match", "", ""),
    ("current_stream", "match", "", ""),
    ("default_stream", "match", "", ""),
    ("set_stream", "match", "", ""),
    ("synchronize", "match", "", ""),
    ("wait_stream", "absent", "", "Use Stream.wait_stream()."),
    ("wait_event", "absent", "", "Use Stream.wait_event()."),
    ("record_event", "absent", "", "Use Stream.record_event()."),
    ("query", "absent", "", "Use Stream.query()."),
)

ADDED: _Rows = (
    ("compile", "added", "", "The NEFF, and its stand-in on a CPU."),
    ("Executable", "added", "", "What compile() returns."),
    ("NeuronStream", "added", "", "The class called Stream."),
    ("UnsupportedError", "added", "", "What is not there, as an exception."),
    ("testing", "added", "", "Gate, and runtimes to step by hand."),
    ("decode", "added", "", "The decode loop."),
    ("get_amp_supported_dtype", "added", "()", "torch asks it of a device's module."),
    ("cache_folder", "added", "()", "Where compiled code and converted weights are kept."),
)

# fmt: on
# Names of torch.cuda that concern neither streams nor events, devices, memory or graphs.
OUTSIDE = frozenset(
    """
    current_blas_handle current_solver_handle get_arch_list get_gencode_flags has_half has_magma
    is_tf32_supported jiterator nccl profiler sparse tunable BFloat16Storage BFloat16Tensor
    BoolStorage BoolTensor ByteStorage ByteTensor CharStorage CharTensor ComplexDoubleStorage
    ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage FloatTensor HalfStorage
    HalfTensor IntStorage IntTensor LongStorage LongTensor ShortStorage ShortTensor
    """.split()  # noqa: SIM905
)
# Absent names that are classes: a program names them in annotations and isinstance.
CLASSES = frozenset(
    ["CUDAGraph", "CUDAPluggableAllocator", "GreenContext", "MemPool", "cudaStatus", "graph"]
)
