"""Arrays in and out: names the element types that numpy and DLPack cannot pass, and allocates outputs like the inputs.

Accepted everywhere: numpy arrays, torch CPU tensors, and whatever else in CPU memory has DLPack or the buffer protocol.
bfloat16 and float8e4m3fn arrive as torch tensors or as numpy arrays with the types of the package ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# numpy's names of the ml_dtypes types -> (the integer type of the same width, octavo's name).
_NUMPY_TYPES: dict[str, tuple[type, str]] = {
    "bfloat16": (np.uint16, "bfloat16"),
    "float8_e4m3fn": (np.uint8, "float8e4m3fn"),
}


def native_view(array: Any) -> tuple[Any, str]:
    """Return (the same memory in a form that the extension can import, its octavo type name or "" for the form's own).

    Shares memory with `array`; nothing is copied, so caches stay updatable in place.
    """
    if isinstance(array, np.ndarray):
        integer, name = _NUMPY_TYPES.get(array.dtype.name, (None, ""))
        return (array, "") if integer is None else (array.view(integer), name)
    if _is_torch(array):
        array = array.detach()
        if str(array.dtype) == "torch.float8_e4m3fn":  # torch's own DLPack export of it came late
            import torch

            return array.view(torch.uint8), "float8e4m3fn"
    return array, ""


def require_importable(name: str, array: Any, written: bool) -> None:
    """Raises ValueError where `array` is a numpy array that DLPack cannot pass on, and says which property is why.

    written: the array is an output or a cache.
    """
    if not isinstance(array, np.ndarray):
        return
    if not array.dtype.isnative:
        raise ValueError(
            f"{name}: must have the byte order of this machine, got {array.dtype.str!r}; convert it, for example with "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if array.dtype.name not in _NUMPY_TYPES and array.dtype.kind not in "biufc":
        raise ValueError(f"{name}: no octavo type has elements of type {array.dtype}; cast it [V2]")
    if written and not array.flags.writeable:
        raise ValueError(f"{name}: is read-only, and it is written in place; pass a writable array")


def empty_like(like: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of `shape` with the library (numpy or torch), and element type of `like`.

    Raises TypeError where `like` is neither: pass the output buffer yourself then.
    """
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    if _is_torch(like):
        return like.new_empty(shape)
    raise TypeError(
        f"query: cannot allocate an output like {type(like).__module__}.{type(like).__name__}; "
        "pass output=, a writable CPU array of query's element type"
    )


def empty_float32_like(like: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised float32 array of `shape`: a torch tensor where `like` is one, else a numpy array."""
    if _is_torch(like):
        import torch

        return like.new_empty(shape, dtype=torch.float32)
    return np.empty(shape, np.float32)


def _is_torch(array: Any) -> bool:
    return type(array).__module__.split(".")[0] == "torch"
