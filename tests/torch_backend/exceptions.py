"""What the operator tests excuse, each with its reason. At most one entry in a hundred differs."""

SPARSE = "the device has no sparse tensors; the call raises"
CHUNKED = "torch computes bfloat16 in float32 on the CPU alone, and as it is on other devices"

# Operators that do not give the CPU's result, bit for bit.
DIFFERENT = {
    "linalg.lu_solve": "the CPU's kernel leaves a lazy conjugate bit on the tensor given as out=",
    "nn.functional.linear_cross_entropy.chunked": CHUNKED,
    "nn.functional.linear_cross_entropy.chunked_none": CHUNKED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
}

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

# Arguments that torch wants on the host, whatever the device of the others.
HOST_ARGUMENTS = {"tensor_split"}

# Errors that depend on values: the device finds them, as on CUDA, and the reader is told.
LATE = (
    r"out of (bounds|range)|singular|positive-definite|probability|could not be completed|"
    r"invalid multinomial distribution|number of categories|without overflow"
)

SIZE = "the size of a result depends on data"
VALUE = "the result is a Python number, or decides what torch calls next"
INFO = "torch reads whether the factorization succeeded, and raises"
SELECTS = "the gradient selects by a mask, or by what is zero"

# Operators that wait for the stream, as they do on CUDA.
WAITING = {
    "_batch_norm_with_update": "the call with out= is refused, in words that show the tensors",
    **dict.fromkeys(
        [
            "argwhere",
            "bincount",
            "combinations",
            "masked_select",
            "nonzero",
            "unique",
            "unique_consecutive",
            "nn.functional.one_hot",
        ],
        SIZE,
    ),
    **dict.fromkeys(
        [
            "allclose",
            "corrcoef",
            "cov",
            "equal",
            "index_fill",
            "istft",
            "masked_fill",
            "nn.functional.ctc_loss",
            "nn.functional.gaussian_nll_loss",
        ],
        VALUE,
    ),
    **dict.fromkeys(
        [
            "linalg.cholesky",
            "linalg.inv",
            "linalg.ldl_factor",
            "linalg.lstsq",
            "linalg.lstsq.grad_oriented",
            "linalg.lu_factor",
            "linalg.solve",
            "linalg.tensorinv",
            "linalg.tensorsolve",
            "linalg.eig",
            "linalg.eigh",
            "linalg.eigvals",
            "linalg.svd",
            "pca_lowrank",
            "svd",
            "svd_lowrank",
        ],
        INFO,
    ),
    **dict.fromkeys(
        [
            "cumprod",
            "index_put",
            "linalg.vander",
            "masked.cumprod",
            "masked_scatter",
            "max.reduction_no_dim",
            "median",
            "min.reduction_no_dim",
            "nanmedian",
            "prod",
        ],
        SELECTS,
    ),
}
