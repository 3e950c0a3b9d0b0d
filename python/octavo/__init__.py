"""octavo: com.microsoft::PagedAttention, complete and embeddable.

Names are loaded when first used, so that `import octavo` costs nothing and the model tools need no compiled extension.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> the module that defines it
_EXPORTS = {
    "paged_attention": "octavo.attention",
    "explain_call": "octavo.attention",
    "OctavoError": "octavo.errors",
    "UnsupportedError": "octavo.attention",
    "ResourceExhaustedError": "octavo.attention",
    "get_library_path": "octavo.runtime",
    "register": "octavo.runtime",
    "genai_config": "octavo.runtime",
}

_MODULES = ("shape_inference",)  # to be used as octavo.NAME

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from octavo import shape_inference as shape_inference
    from octavo._core import ResourceExhaustedError as ResourceExhaustedError
    from octavo._core import UnsupportedError as UnsupportedError
    from octavo.attention import explain_call as explain_call
    from octavo.attention import paged_attention as paged_attention
    from octavo.errors import OctavoError as OctavoError
    from octavo.runtime import genai_config as genai_config
    from octavo.runtime import get_library_path as get_library_path
    from octavo.runtime import register as register


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"octavo.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))
