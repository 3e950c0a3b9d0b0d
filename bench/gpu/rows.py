"""The rows of the decode table and the bar of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# CONTEXTxBATCH of the headline rows.
X64 = ("1024x32", "4096x8", "4096x32", "16384x8", "16384x32")
X128 = ("4096x32", "16384x8", "131072x1", "1024x128")


@dataclass(frozen=True)
class Bar:
    """What a row has to reach.

    kind: "us" (a time), "percent" (of the read limit for the row's bytes), "ratio" (times the row `of`), "over" (us
    above the row `of`).
    """

    kind: str
    value: float
    of: str = ""


@dataclass(frozen=True)
class Row:
    """work: its name; a name that ends in " call" is the whole operator, append included, of the work before it."""

    work: str
    bar: Bar

    @property
    def measured(self) -> str:
        """The work that is measured for this row."""
        return self.work.removesuffix(" call")

    @property
    def whole_call(self) -> bool:
        """Whether the row is the whole operator rather than attention alone."""
        return self.work != self.measured


def _headlines() -> Iterator[tuple[str, tuple[float, ...], tuple[float, ...]]]:
    """(geometry, shapes, bars of 8 bits, bars of 16 bits)"""
    yield "64/8x64", X64, (11.8, 12.8, 34.5, 36, 125), (18.5, 19.0, 63, 63.5, 236)
    yield "32/8x128", X128, (64.5, 65, 66, 67), (121, 122, 123, 123)


def all_rows() -> list[Row]:
    """Every row, in the order of the table. Page 256 and fp16 Q where the name says nothing else."""
    rows: list[Row] = []

    def add(work: str, kind: str, value: float, of: str = "") -> None:
        rows.append(Row(work, Bar(kind, value, of)))

    for cache, variant in (("int8", ""), ("fp8", ""), ("int8", " bf16 Q"), ("fp8", " bf16 Q")):
        for geometry, shapes, eight_bits, _ in _headlines():
            for shape, bar in zip(shapes, eight_bits, strict=True):
                add(f"{cache} {geometry} {shape}{variant}", "us", bar)
    for cache in ("fp16", "bf16"):
        for geometry, shapes, _, sixteen_bits in _headlines():
            for shape, bar in zip(shapes, sixteen_bits, strict=True):
                add(f"{cache} {geometry} {shape}", "us", bar)
    add("int4 32/8x128 4096x32 PER_CHANNEL", "us", 40)
    add("int4 64/8x64 16384x32 PER_CHANNEL", "us", 76)
    for cache in ("int8", "fp8"):
        for geometry, shapes, _, _ in _headlines():
            for shape in shapes:
                add(f"{cache} {geometry} {shape} PER_CHANNEL", "ratio", 1.03, f"{cache} {geometry} {shape}")
    for cache in ("fp16", "int8"):
        for geometry in ("64/8x64", "32/8x128"):
            for page in (16, 32, 64, 512):
                add(f"{cache} {geometry} 4096x32 page {page}", "percent", 75)
        for size in (96, 192, 256):
            add(f"{cache} 32/8x{size} 4096x32", "percent", 75)
        for group in (1, 5, 7, 12, 16):
            add(f"{cache} {8 * group}/8x128 4096x32", "percent", 75)
        add(f"{cache} 32/8x128 4096x32 softcap 30", "percent", 75)
        for tokens in (2, 4, 8):
            add(f"{cache} 32/8x128 4096x32 {tokens} tokens", "percent", 75)
    add("fp16 32/8x128 16384x8 window 1024", "us", 14)
    add("int8 32/8x128 16384x8 window 1024", "us", 9)
    add("fp16 64/8x64 1024x31+131072x1", "us", 85)
    add("fp16 32/8x128 64..16384x32", "percent", 80)
    add("int8 32/8x128 64..16384x32", "percent", 80)
    for cache in ("int8", "fp8", "fp16", "bf16"):
        for work in ("64/8x64 1024x32", "64/8x64 4096x32", "64/8x64 16384x32", "32/8x128 4096x32"):
            add(f"{cache} {work} call", "over", 3, f"{cache} {work}")
    return rows


def select(rows: list[Row], words: list[str]) -> list[Row]:
    """The rows whose name contains one of `words`, and those that their bars refer to; all of them without words."""
    if not words:
        return rows
    wanted = {row.work for row in rows if any(word in row.work for word in words)}
    wanted |= {row.bar.of for row in rows if row.work in wanted and row.bar.of}
    return [row for row in rows if row.work in wanted]


def for_peers(rows: list[Row]) -> list[str]:
    """The works that peers are asked for: not those that differ from another row in K and V's scales alone."""
    works = dict.fromkeys(row.measured for row in rows)
    return [work for work in works if "PER_CHANNEL" not in work or work.startswith("int4") or "4096x32" in work]
