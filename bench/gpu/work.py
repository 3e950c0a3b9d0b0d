"""Names of decode works: "CACHE HEADS/KVxSIZE CONTEXTxBATCH[ VARIANT]". bench/gpu/work.cc reads the same ones."""

from __future__ import annotations

from dataclasses import dataclass

CACHES = {"fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4}  # bits of an element


@dataclass(frozen=True)
class Work:
    """One decode step: every sequence has `new_tokens` query tokens, the last of its `lengths`."""

    name: str
    cache: str
    q_type: str  # of Q, the new K and V, and the output: fp16 or bf16
    num_heads: int
    kv_num_heads: int
    head_size: int
    lengths: tuple[int, ...]
    per_channel: bool = False
    new_tokens: int = 1
    page: int = 256
    window: int = -1
    softcap: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of K and V that attention reads once: what a row's floor is made of."""
        positions = sum(min(n, self.window + self.new_tokens - 1) if self.window > 0 else n for n in self.lengths)
        return positions * self.kv_num_heads * 2 * ((self.head_size * CACHES[self.cache] + 7) // 8)


def _lengths(text: str) -> tuple[int, ...]:
    """The lengths that "1024x31+131072x1" or "64..16384x32" (log-spaced, ascending) names."""
    lengths: list[int] = []
    for part in text.split("+"):
        context, count = part.split("x")
        if ".." not in context:
            lengths += [int(context)] * int(count)
            continue
        low, high = (int(end) for end in context.split(".."))
        last = int(count) - 1
        lengths += [int(low * (high / low) ** (i / last) + 0.5) for i in range(last + 1)]
    return tuple(lengths)


def parse(name: str) -> Work:
    """The work of this name. Raises ValueError for a name that does not follow the grammar of work.h."""
    words = name.split()
    variants: dict[str, int | str | bool] = {}
    try:
        cache, geometry, shape = words[:3]
        heads, rest = geometry.split("/")
        kv_heads, size = rest.split("x")
        i = 3
        while i < len(words):
            if words[i] == "PER_CHANNEL":
                variants["per_channel"] = True
                i += 1
                continue
            word, following = words[i], words[i + 1]
            i += 2
            if (word, following) == ("bf16", "Q"):
                variants["q_type"] = "bf16"
            elif word in ("page", "window", "softcap"):
                variants[word] = int(following)
            elif following == "tokens":
                variants["new_tokens"] = int(word)
            else:
                raise ValueError(f"no variant {word} {following}")
        if cache not in CACHES:
            raise ValueError(f"no cache type {cache}")
        variants.setdefault("q_type", "bf16" if cache == "bf16" else "fp16")
        return Work(name, cache, num_heads=int(heads), kv_num_heads=int(kv_heads), head_size=int(size),
                    lengths=_lengths(shape), **variants)  # fmt: skip
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"work {name!r}: {error}") from error
