"""Weight matrices between GGUF's block formats and what ONNX Runtime multiplies with.

Two forms exist: Dense (float32) and Blockwise (com.microsoft::MatMulNBits, blocks of 32 columns). Every mapping into
Blockwise from Q4_0, Q4_1, Q4_K and Q8_0 keeps the stored codes, so it is exact; other types are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf.quants
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from .errors import OctavoError, quoted
from .gguf_reader import GGUFFile, require_finite

BLOCK = 32  # columns that share one scale


@dataclass(frozen=True)
class Dense:
    """values: float32 (rows, columns)."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def rows(self, order: np.ndarray) -> Dense:
        return Dense(self.values[order])

    def dequantised(self) -> np.ndarray:
        return self.values


@dataclass(frozen=True)
class Blockwise:
    """w[n, k] = scale[n, k//32] * (code[n, k] - 2**(bits-1)) + offset[n, k//32].

    codes: uint8 (rows, blocks, 32*bits/8), for 4 bits the even column in the low nibble.
    scales: float32 (rows, blocks). offsets: the same, or None where all are zero. MatMulNBits has no float offset at
    full speed, so the graph adds it as a product of its own: sum over blocks of offset[n, b] * (sum of x over block b).
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * BLOCK

    def rows(self, order: np.ndarray) -> Blockwise:
        # Blocks run along columns, so reordering rows moves whole blocks and stays exact.
        offsets = None if self.offsets is None else self.offsets[order]
        return Blockwise(self.bits, self.codes[order], self.scales[order], offsets)

    def dequantised(self) -> np.ndarray:
        codes = self.codes
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], BLOCK)
        values = (codes.astype(np.float32) - (1 << (self.bits - 1))) * self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(self.shape)


Weight = Dense | Blockwise


def load(file: GGUFFile, name: str, form: str, is_head: bool = False) -> Weight:
    """Matrix `name` in the wanted form.

    Args:
        form: "float32" gives Dense. "int4" gives Blockwise: exact for Q4_0, Q4_1, Q4_K and Q8_0; 8 bits, rounded, for
            the output head and for types of more than 4 bits that were quantised before; 4 bits, rounded, for the rest.
            A matrix whose columns are not a multiple of 32 stays Dense.
        is_head: the matrix makes the logits, where 4 bits cost the most.
    """
    info = file.tensor(name)
    if form == "float32" or info.shape[-1] % BLOCK:
        return Dense(file.dequantised(name))
    with np.errstate(all="ignore"):  # a damaged file's numbers; the result is checked
        if info.kind in _EXACT:
            weight = _EXACT[info.kind](file.raw(name))
        elif is_head or info.kind in _MORE_THAN_4_BITS:
            weight = round_to_8_bits(file.dequantised(name))
        else:
            weight = round_to_4_bits(file.dequantised(name))
    for numbers in (weight.scales, weight.offsets):
        if numbers is not None:
            require_finite(numbers, f"{file.path}: tensor {quoted(name)}")
    return weight


def stack(parts: list[Weight]) -> Weight | None:
    """The parts' rows as one matrix, or None where their forms differ."""
    if all(isinstance(part, Dense) for part in parts):
        return Dense(np.concatenate([part.values for part in parts]))
    if not all(isinstance(part, Blockwise) for part in parts) or len({part.bits for part in parts}) != 1:
        return None
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = np.concatenate([np.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
    return Blockwise(
        parts[0].bits,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        offsets,
    )


def round_to_8_bits(values: np.ndarray) -> Blockwise:
    """Symmetric, to the nearest of 255 levels a block. values: float32 (rows, columns)."""
    blocks = values.reshape(values.shape[0], -1, BLOCK)
    scales = np.abs(blocks).max(axis=-1) / 127.0
    codes = np.rint(blocks / np.where(scales == 0, 1, scales)[..., None]) + 128
    return Blockwise(8, codes.astype(np.uint8), scales.astype(np.float32), None)


def round_to_4_bits(values: np.ndarray) -> Blockwise:
    """To the nearest of 16 levels between each block's smallest and largest value (Q4_1's rule)."""
    blocks = values.reshape(values.shape[0], -1, BLOCK)
    low = blocks.min(axis=-1)
    scales = (blocks.max(axis=-1) - low) / 15.0
    codes = np.clip(np.rint((blocks - low[..., None]) / np.where(scales == 0, 1, scales)[..., None]), 0, 15)
    return _four_bits(codes.astype(np.uint8), scales.astype(np.float32), low.astype(np.float32))


def _four_bits(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray | None) -> Blockwise:
    """codes: uint8 (rows, blocks, 32) of w = scale*code + minimum; minima None stands for -8*scale."""
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Blockwise(4, packed, scales, None if minima is None else minima + 8.0 * scales)


def _halves(data: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32."""
    return np.ascontiguousarray(data[..., start : start + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """16 bytes -> 32 codes: GGUF keeps columns 0..15 in the low nibbles and 16..31 in the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _from_q4_0(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 18)
    return _four_bits(_nibbles(blocks[..., 2:]), _halves(blocks, 0), None)


def _from_q4_1(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 20)
    return _four_bits(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _from_q8_0(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 34)
    return Blockwise(8, blocks[..., 2:] ^ 0x80, _halves(blocks, 0), None)  # int8 + 128, as uint8


def _from_q4_k(raw: np.ndarray) -> Blockwise:
    # A super-block: d, dmin, 12 bytes of eight 6-bit scales and minima, then 4 x 32 bytes of nibbles; 256 columns.
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 144)
    factors, minima = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (rows, blocks.shape[1], 8)
    scales = _halves(blocks, 0)[..., None] * factors.reshape(shape).astype(np.float32)
    offsets = -_halves(blocks, 2)[..., None] * minima.reshape(shape).astype(np.float32)
    nibbles = blocks[..., 16:].reshape(rows, -1, 4, 32)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(rows, -1, BLOCK)
    return _four_bits(codes, scales.reshape(rows, -1), offsets.reshape(rows, -1))


_EXACT = {Kind.Q4_0: _from_q4_0, Kind.Q4_1: _from_q4_1, Kind.Q8_0: _from_q8_0, Kind.Q4_K: _from_q4_k}
_MORE_THAN_4_BITS = (Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K)


def vector(file: GGUFFile, name: str) -> np.ndarray:
    """Tensor `name` as float32 (n); norms and biases."""
    values = file.dequantised(name)
    if values.ndim != 1:
        raise OctavoError(f"{file.path}: tensor {quoted(name)} must be a vector, it has shape {values.shape}.")
    return values
