"""Reading GGUF files that may be damaged, foreign or hostile.

The format is a header (magic, version, counts), typed key/value metadata, tensor descriptions, and aligned tensor data.
The `gguf` package's own reader trusts every count and length in the file; this one checks each against what is left of
the file before it reads or allocates, so that a bad file costs one sentence. The package still does the dequantisation.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf.quants
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import OctavoError, quoted

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Beyond any real file, and small enough that a lie in the header cannot take the machine's memory.
MAX_METADATA_ENTRIES = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY_ITEMS = 16 << 20
MAX_RANK = 4

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
_PLAIN_TENSORS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)


def _readable(kind: GGMLQuantizationType) -> bool:
    """Whether gguf.quants can turn `kind` into float32."""
    if kind in _PLAIN_TENSORS:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


READABLE_TYPES: tuple[GGMLQuantizationType, ...] = tuple(kind for kind in GGML_QUANT_SIZES if _readable(kind))


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in numpy order (rows first), the reverse of the file's."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    byte_count: int


class GGUFFile:
    """Metadata and tensors of one GGUF file. Use as a context manager.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, list of str, or 1-D numpy array.
        tensors: name -> TensorInfo.

    Raises OctavoError from every method where the file is not what it claims.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._file: BinaryIO = self._open()
        try:
            self._read_header()
        except OSError as error:
            self.close()
            raise OctavoError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of tensor `name`: uint8 (rows, bytes of a row); rows: all extents but the last."""
        info = self.tensor(name)
        rows = 1
        for extent in info.shape[:-1]:
            rows *= extent
        data = np.empty(info.byte_count, np.uint8)
        try:
            self._file.seek(info.offset)
            got = self._file.readinto(data)  # type: ignore[attr-defined]
        except OSError as error:
            raise OctavoError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if got != info.byte_count:
            raise OctavoError(f"{self.path} shrank while it was read: tensor {quoted(name)} is incomplete.")
        return data.reshape(rows, -1)

    def dequantised(self, name: str) -> np.ndarray:
        """Tensor `name` as float32, in its own shape. Refuses NaN and infinities: they mean a damaged file."""
        info = self.tensor(name)
        if info.kind not in READABLE_TYPES:
            supported = ", ".join(kind.name for kind in READABLE_TYPES)
            raise OctavoError(
                f"{self.path}: tensor {quoted(name)} is stored as {info.kind.name}, which cannot be read; "
                f"supported are {supported}."
            )
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(self.raw(name), info.kind).astype(np.float32, copy=False)
        return require_finite(values, f"{self.path}: tensor {quoted(name)}").reshape(info.shape)

    def tensor(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise OctavoError(
                f"{self.path} has no tensor {quoted(name)}: it is incomplete or of another architecture."
            ) from None

    # --- header ---

    def _open(self) -> BinaryIO:
        try:
            mode = os.stat(self.path).st_mode
            if stat.S_ISDIR(mode):
                raise OctavoError(f"{self.path} is a folder; give the .gguf file itself.")
            if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
                raise OctavoError(f"{self.path} is not a regular file; give a .gguf file.")
            file = open(self.path, "rb", buffering=1 << 20)  # noqa: SIM115 (close() and __exit__ close it)
        except OSError as error:
            raise OctavoError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        self._size = os.fstat(file.fileno()).st_size
        self._offset = 0
        return file

    def _read_header(self) -> None:
        self._check_magic()
        tensor_count, entry_count = self._unpack("<QQ", "the counts of tensors and metadata")
        self._limit(entry_count, MAX_METADATA_ENTRIES, "metadata entries", smallest_bytes=13)
        self._limit(tensor_count, MAX_TENSORS, "tensors", smallest_bytes=32)
        for _ in range(entry_count):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                raise OctavoError(f"{self.path} is damaged: metadata key {quoted(key)} appears twice.")
            (code,) = self._unpack("<I", f"the type of metadata {quoted(key)}")
            self.metadata[key] = self._value(code, key)
        described = [self._tensor_description() for _ in range(tensor_count)]
        self._place_tensors(described)

    def _check_magic(self) -> None:
        start = self._take(min(4, self._size), "the magic number")
        if start != MAGIC:
            hint = " (it is a Git LFS pointer: run `git lfs pull`)" if start == b"vers" else ""
            got = "it is empty" if not start else f"it starts with {start!r} instead of {MAGIC!r}"
            raise OctavoError(f"{self.path} is not a GGUF file: {got}{hint}.")
        (version,) = self._unpack("<I", "the version")
        if version not in SUPPORTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in SUPPORTED_VERSIONS else f"has GGUF version {version}"
            raise OctavoError(f"{self.path} {what}; versions 2 and 3, little-endian, can be read: convert it again.")

    def _value(self, code: int, key: str) -> Any:
        if code == _STRING:
            return self._string(f"metadata {quoted(key)}", MAX_STRING_BYTES)
        if code == _ARRAY:
            return self._array(key)
        dtype = self._scalar_type(code, key)
        return np.frombuffer(self._take(dtype.itemsize, f"metadata {quoted(key)}"), dtype)[0].item()

    def _array(self, key: str) -> list[str] | np.ndarray:
        what = f"metadata {quoted(key)}"
        code, count = self._unpack("<IQ", what)
        if code == _STRING:
            self._limit(count, MAX_ARRAY_ITEMS, f"strings in {what}", smallest_bytes=8)
            return [self._string(what, MAX_STRING_BYTES) for _ in range(count)]
        if code == _ARRAY:
            raise OctavoError(f"{self.path}: {what} is an array of arrays, which no GGUF writer produces.")
        dtype = self._scalar_type(code, key)
        self._limit(count, MAX_ARRAY_ITEMS, f"items in {what}", smallest_bytes=dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _scalar_type(self, code: int, key: str) -> np.dtype:
        try:
            return _SCALARS[code]
        except KeyError:
            raise OctavoError(f"{self.path} is damaged: metadata {quoted(key)} has unknown type {code}.") from None

    def _tensor_description(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name", MAX_KEY_BYTES)
        what = f"the description of tensor {quoted(name)}"
        (rank,) = self._unpack("<I", what)
        if not 1 <= rank <= MAX_RANK:
            raise OctavoError(
                f"{self.path} is damaged: tensor {quoted(name)} has {rank} dimensions; 1 to {MAX_RANK} are legal."
            )
        shape = self._unpack(f"<{rank}Q", what)[::-1]
        code, offset = self._unpack("<IQ", what)
        return name, shape, code, offset

    def _place_tensors(self, described: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            got = _shown(alignment)
            raise OctavoError(f"{self.path} is damaged: general.alignment is {got}, not a power of two up to 2^20.")
        start = -(-self._offset // alignment) * alignment
        for name, shape, code, offset in described:
            if name in self.tensors:
                raise OctavoError(f"{self.path} is damaged: tensor {quoted(name)} appears twice.")
            try:
                kind = GGMLQuantizationType(code)
                block, block_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise OctavoError(
                    f"{self.path}: tensor {quoted(name)} has unknown type {code}; "
                    "the file is damaged or newer than the installed gguf package (pip install -U gguf)."
                ) from None
            elements = 1
            for extent in shape:
                elements *= extent
            if elements == 0 or shape[-1] % block:
                raise OctavoError(
                    f"{self.path} is damaged: tensor {quoted(name)} has shape {shape}; "
                    f"{kind.name} needs rows of a multiple of {block} elements."
                )
            byte_count = elements // block * block_bytes
            if start + offset + byte_count > self._size:
                raise OctavoError(
                    f"{self.path} is truncated: tensor {quoted(name)} ends at byte {start + offset + byte_count:,}, "
                    f"the file has {self._size:,}; download it again."
                )
            self.tensors[name] = TensorInfo(name, kind, shape, start + offset, byte_count)

    # --- bounded reads ---

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._offset:
            raise OctavoError(
                f"{self.path} is truncated: {what} needs {count:,} bytes at byte {self._offset:,}, "
                f"the file has {self._size:,}; download it again."
            )
        data = self._file.read(count)
        if len(data) != count:
            raise OctavoError(f"{self.path} shrank while it was read.")
        self._offset += count
        return data

    def _unpack(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))

    def _string(self, what: str, limit: int) -> str:
        (count,) = self._unpack("<Q", what)
        self._limit(count, limit, f"bytes in {what}", smallest_bytes=1)
        try:
            return self._take(count, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise OctavoError(f"{self.path} is damaged: {what} is not UTF-8 ({error.reason}).") from None

    def _limit(self, count: int, limit: int, what: str, smallest_bytes: int) -> None:
        """Refuses a count that is absurd, or that what is left of the file cannot hold."""
        if count > limit:
            raise OctavoError(f"{self.path} is damaged: it claims {count:,} {what}; at most {limit:,} are plausible.")
        if count * smallest_bytes > self._size - self._offset:
            raise OctavoError(
                f"{self.path} is truncated or damaged: it claims {count:,} {what}, "
                f"but only {self._size - self._offset:,} bytes are left."
            )


def require_finite(values: np.ndarray, what: str) -> np.ndarray:
    """Returns `values`; raises OctavoError where one is NaN or infinite."""
    if not np.isfinite(values).all():
        raise OctavoError(f"{what} holds NaN or infinite values: the file is damaged; download it again.")
    return values


def _shown(value: object) -> str:
    """A metadata value for a message: one line, whatever it is."""
    return "a list" if isinstance(value, (list, np.ndarray)) else quoted(value)


def metadata_value(file: GGUFFile, key: str, kind: Callable[..., Any], default: Any = None) -> Any:
    """Metadata `key`, checked to be of type `kind` (int, float, str, bool).

    Errors: OctavoError where the key is absent and `default` is None, or where it has another type.
    """
    value = file.metadata.get(key, default)
    if value is None:
        raise OctavoError(f"{file.path} has no metadata {quoted(key)}, which a model of this architecture needs.")
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise OctavoError(f"{file.path}: metadata {quoted(key)} must be of type {kind.__name__}, got {_shown(value)}.")
    return value
