"""What the commands share: types of their options, and names that --help lists without heavy imports."""

from __future__ import annotations

import math
from typing import Any

import click

EXIT_FAILURE = 1
INT32_MAX = 2**31 - 1
# What modules with heavy imports define; a test compares them.
WEIGHT_FORMS = ("int4", "int8", "float32")  # weights.WEIGHT_FORMS
BENCH_CACHES = ("float32", "float16", "int8", "float8e4m3fn", "int4")  # bench.CACHE_TYPES
GENAI_CACHES = ("float32", "float16", "bfloat16", "int8", "float8e4m3fn", "int4")
DEFAULT_CACHE = "float16"  # no difference that a text shows, and half of float32's memory and reading
MIXED_CACHE = "int8-int4"
MIXED_REFUSAL = (
    f"{MIXED_CACHE} has keys and values of different types, which onnxruntime-genai, and so octavo generate, does not "
    "run: choose int8, or int4 after octavo perplexity. For a program that binds the caches itself, "
    f'octavo.convert.convert(..., GraphOptions(cache_type="{MIXED_CACHE}")) writes the model.'
)
PATH = click.Path(readable=False)  # for completion; the commands say themselves what is wrong with a path
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead, for other programs.")


class FiniteRange(click.FloatRange):
    """A range of numbers; NaN is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class CacheType(click.Choice):
    """A type of key-value cache. The mixed one, where it is not among the choices, is refused with what to do."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == MIXED_CACHE and value not in self.choices:
            self.fail(MIXED_REFUSAL, param, ctx)
        return super().convert(value, param, ctx)


def kv_cache_option(parameter: str, types: tuple[str, ...], **settings: Any) -> Any:
    """--kv-cache of a command that takes these types."""
    return click.option("--kv-cache", parameter, type=CacheType(types), **settings)
