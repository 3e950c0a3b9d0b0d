"""Weight matrices between GGUF's block formats and what ONNX Runtime multiplies with.

Two forms exist: Dense (float32) and Blockwise (com.microsoft::MatMulNBits). A GGUF type whose values are small integers
times a scale per block, with or without an offset, keeps its codes in Blockwise, so that nothing is rounded: in 4 bits
Q2_K, Q3_K, Q4_0, Q4_1 and Q4_K, in 8 bits Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, IQ4_NL, IQ4_XS and MXFP4. Others are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf.quants
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from .errors import OctavoError, quoted
from .gguf_reader import GGUFFile, require_finite

BLOCK = 32  # columns that share one scale where values are rounded here
WEIGHT_FORMS = ("int4", "int8", "float32")


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
    """w[n, k] = scale[n, k//block] * (code[n, k] - 2**(bits-1)) + offset[n, k//block], block = 16 or 32.

    codes: uint8 (rows, blocks, block*bits/8), for 4 bits the even column in the low nibble.
    scales: float32 (rows, blocks). offsets: the same, or None where all are zero. MatMulNBits has no float offset at
    full speed, so the graph adds it as a product of its own: sum over blocks of offset[n, b] * (sum of x over block b).
    """

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None

    @property
    def block(self) -> int:
        return self.codes.shape[2] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.block

    def rows(self, order: np.ndarray) -> Blockwise:
        # Blocks run along columns, so reordering rows moves whole blocks and stays exact.
        offsets = None if self.offsets is None else self.offsets[order]
        return Blockwise(self.bits, self.codes[order], self.scales[order], offsets)

    def dequantised(self) -> np.ndarray:
        codes = self.codes
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], self.block)
        values = (codes.astype(np.float32) - (1 << (self.bits - 1))) * self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(self.shape)


Weight = Dense | Blockwise


def load(file: GGUFFile, name: str, form: str, is_head: bool = False) -> Weight:
    """Matrix `name` in the wanted form; of a tensor of matrices, the rows of all of them.

    Args:
        form: of WEIGHT_FORMS. "float32" gives Dense, the others Blockwise: the stored codes where the type has them
            (_EXACT), else rounded, to 4 bits for "int4" and to 8 for "int8" and for the output head.
            A matrix whose columns are not a multiple of 32 stays Dense.
        is_head: the matrix makes the logits, where 4 bits cost the most.
    """
    info = file.tensor(name)

    def values() -> np.ndarray:
        return file.dequantised(name).reshape(-1, info.shape[-1])

    if form == "float32" or info.shape[-1] % BLOCK:
        return Dense(values())
    with np.errstate(all="ignore"):  # a damaged file's numbers; the result is checked
        if info.kind in _EXACT:
            weight = _EXACT[info.kind](file.raw(name))
        elif is_head or form == "int8":
            weight = round_to_8_bits(values())
        else:
            weight = round_to_4_bits(values())
    for numbers in (weight.scales, weight.offsets):
        if numbers is not None:
            require_finite(numbers, f"{file.path}: tensor {quoted(name)}")
    return weight


def stack(parts: list[Weight]) -> Weight | None:
    """The parts' rows as one matrix, or None where their forms differ."""
    if all(isinstance(part, Dense) for part in parts):
        return Dense(np.concatenate([part.values for part in parts]))
    if not all(isinstance(part, Blockwise) for part in parts) or len({(p.bits, p.block) for p in parts}) != 1:
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


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of Q4_K and Q5_K, (rows, 8 * super-blocks) each; blocks: (rows, super-blocks, bytes).

    A super-block of 256 columns starts with d, dmin, and 12 bytes of eight 6-bit scales and minima.
    """
    rows = blocks.shape[0]
    factors, minima = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (rows, blocks.shape[1], 8)
    scales = _halves(blocks, 0)[..., None] * factors.reshape(shape).astype(np.float32)
    offsets = -_halves(blocks, 2)[..., None] * minima.reshape(shape).astype(np.float32)
    return scales.reshape(rows, -1), offsets.reshape(rows, -1)


def _from_q4_k(raw: np.ndarray) -> Blockwise:
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, 144)
    nibbles = blocks[..., 16:].reshape(rows, -1, 4, 32)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(rows, -1, BLOCK)
    return _four_bits(codes, *_k_scales(blocks))


def _dequantised_with(raw: np.ndarray, kind: Kind, block: int, *patches: tuple[int, bytes]) -> np.ndarray:
    """What the gguf package makes of GGUF's blocks with some of their bytes replaced: float32 (rows, blocks, block).

    With every scale 1 and every minimum 0 that is a type's codes; with every code 1, its scales.
    patches: (first byte in GGUF's block, the bytes to put there).
    """
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    for start, value in patches:
        blocks[:, start : start + len(value)] = np.frombuffer(value, np.uint8)
    return gguf.quants.dequantize(blocks, kind).reshape(raw.shape[0], -1, block)


def _codes(raw: np.ndarray, kind: Kind, block: int, *ones: tuple[int, bytes]) -> np.ndarray:
    """Codes of a type that 8 bits hold, biased by 128: uint8 (rows, blocks, block). ones: make every scale 1."""
    return (_dequantised_with(raw, kind, block, *ones) + 128).astype(np.uint8)


_ONE, _ZERO = b"\x00\x3c", b"\0\0"  # as float16
_K_ONES = bytes([1] * 4 + [0] * 4 + [1] * 4)  # eight 6-bit scales of 1 and minima of 0


def _from_q5_0(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 22)
    return Blockwise(8, _codes(raw, Kind.Q5_0, 32, (0, _ONE)), _halves(blocks, 0), None)


def _from_q5_1(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 24)
    return Blockwise(8, _codes(raw, Kind.Q5_1, 32, (0, _ONE + _ZERO)), _halves(blocks, 0), _halves(blocks, 2))


def _from_q5_k(raw: np.ndarray) -> Blockwise:
    scales, offsets = _k_scales(raw.reshape(raw.shape[0], -1, 176))
    return Blockwise(8, _codes(raw, Kind.Q5_K, 32, (0, _ONE + _ZERO + _K_ONES)), scales, offsets)


def _from_q6_k(raw: np.ndarray) -> Blockwise:
    # A super-block: 192 bytes of codes, 16 int8 scales of 16 columns each, d.
    blocks = raw.reshape(raw.shape[0], -1, 210)
    factors = blocks[..., 192:208].view(np.int8).astype(np.float32)
    scales = (_halves(blocks, 208)[..., None] * factors).reshape(raw.shape[0], -1)
    return Blockwise(8, _codes(raw, Kind.Q6_K, 16, (192, b"\1" * 16 + _ONE)), scales, None)


def _from_iq4_nl(raw: np.ndarray) -> Blockwise:
    blocks = raw.reshape(raw.shape[0], -1, 18)
    return Blockwise(8, _codes(raw, Kind.IQ4_NL, 32, (0, _ONE)), _halves(blocks, 0), None)


def _from_mxfp4(raw: np.ndarray) -> Blockwise:
    exponents = raw.reshape(raw.shape[0], -1, 17)[..., 0].astype(np.int32)
    scales = np.ldexp(np.float32(1), exponents - 128)  # the package's codes are twice the e2m1 values
    return Blockwise(8, _codes(raw, Kind.MXFP4, 32, (0, b"\x80")), scales, None)


def _from_q2_k(raw: np.ndarray) -> Blockwise:
    # A super-block: 16 bytes of a scale and a minimum for 16 columns each, 64 of codes from 0 to 3, d, dmin.
    codes = _dequantised_with(raw, Kind.Q2_K, 16, (0, b"\1" * 16), (80, _ONE + _ZERO))
    scales = _dequantised_with(raw, Kind.Q2_K, 16, (16, b"\x55" * 64), (82, _ZERO))[..., 0]
    minima = _dequantised_with(raw, Kind.Q2_K, 16, (16, b"\0" * 64))[..., 0]
    return _four_bits(codes.astype(np.uint8), scales, minima)


def _from_q3_k(raw: np.ndarray) -> Blockwise:
    # A super-block: 32 bytes of high bits, 64 of low pairs, codes from -4 to 3; 12 of 6-bit scales for 16 columns; d.
    codes = _dequantised_with(raw, Kind.Q3_K, 16, (96, b"\x11" * 8 + b"\xaa" * 4 + _ONE)) + 8
    scales = _dequantised_with(raw, Kind.Q3_K, 16, (0, b"\xff" * 32 + b"\x55" * 64))[..., 0]
    return _four_bits(codes.astype(np.uint8), scales, None)


def _from_iq4_xs(raw: np.ndarray) -> Blockwise:
    # A super-block: d, 6 bytes of 6-bit scales for 32 columns each, 128 of indices into IQ4_NL's table.
    scales = _dequantised_with(raw, Kind.IQ4_XS, 32, (8, b"\x88" * 128))[..., 0]  # the table's entry 8 is 1
    return Blockwise(8, _codes(raw, Kind.IQ4_XS, 32, (0, _ONE + b"\xaa" * 2 + b"\x11" * 4)), scales, None)


_EXACT: dict[Kind, Callable[[np.ndarray], Blockwise]] = {
    Kind.Q2_K: _from_q2_k,
    Kind.Q3_K: _from_q3_k,
    Kind.Q4_0: _from_q4_0,
    Kind.Q4_1: _from_q4_1,
    Kind.Q4_K: _from_q4_k,
    Kind.Q5_0: _from_q5_0,
    Kind.Q5_1: _from_q5_1,
    Kind.Q5_K: _from_q5_k,
    Kind.Q6_K: _from_q6_k,
    Kind.Q8_0: _from_q8_0,
    Kind.IQ4_NL: _from_iq4_nl,
    Kind.IQ4_XS: _from_iq4_xs,
    Kind.MXFP4: _from_mxfp4,
}


def vector(file: GGUFFile, name: str) -> np.ndarray:
    """Tensor `name` as float32 (n); norms and biases."""
    values = file.dequantised(name)
    if values.ndim != 1:
        raise OctavoError(f"{file.path}: tensor {quoted(name)} must be a vector, it has shape {values.shape}.")
    return values
