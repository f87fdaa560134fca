"""What the operator tests excuse, each with its reason. At most one entry in a hundred differs."""

# Operators that do not give the CPU's result, bit for bit.
DIFFERENT: dict[str, str] = {}

# Operators whose results have undefined contents: shape, dtype and strides only.
UNDEFINED = {
    "empty": "uninitialised",
    "empty_like": "uninitialised",
    "empty_permuted": "uninitialised",
    "empty_strided": "uninitialised",
    "new_empty": "uninitialised",
    "new_empty_strided": "uninitialised",
    "resize_": "the new elements are uninitialised",
    "resize_as_": "the new elements are uninitialised",
}

# Errors that depend on values: the device finds them, as on CUDA, and the reader is told.
LATE = r"out of (bounds|range)|singular|positive-definite|probability|could not be completed"

# Operators that wait for the stream, as they do on CUDA.
WAITING: dict[str, str] = {}
