"""Check that every folder includes only what docs/architecture.md lets it include.

C++: the #include lines of each file against RULES. Python: only octavo/attention.py loads the compiled extension, so
that the model tools work without it, and torch is imported inside functions only, because it is not a dependency.

Usage: check_layers.py [--self-test]
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_SUFFIXES = {".h", ".cc", ".cuh", ".cu", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# Folders that the compiler searches for a quoted include, after the file's own.
INCLUDE_ROOTS = ("include", "src", "", "tests")

# Names for what is not ours: the start of the include's path -> name.
THIRD_PARTY = {
    "hwy/": "highway",
    "nanobind/": "nanobind",
    "onnxruntime": "onnxruntime",
    "gtest/": "gtest",
    "gmock/": "gtest",
    "benchmark/": "benchmark",
    "omp.h": "openmp",
    "cuda": "cuda",
    "vector_types.h": "cuda",
}


@dataclass(frozen=True)
class Rule:
    """Files under `where` may include paths of this repository that start with one of `may`, and these others.

    Every file may include the C++ standard library and its own folder.
    """

    where: str
    may: tuple[str, ...]
    others: tuple[str, ...] = ()


CUDA_VOCABULARY = ("src/cuda/call.h", "src/cuda/launch.cuh", "src/cuda/device/")

# The first rule whose `where` a file's path starts with holds. A C++ file that no rule covers is an error.
RULES = (
    Rule("include/octavo/", ()),
    Rule("src/contract/", ("include/",)),
    Rule("src/dispatch/", ("include/", "src/contract/")),
    Rule("src/backends.cc", ("include/", "src/dispatch/backend.h", "src/cpu/backend.h", "src/cuda/backend.h")),
    Rule("src/executor.cc", ("include/",), ("openmp", "system")),
    Rule("src/cpu/", ("include/", "src/contract/", "src/dispatch/backend.h"), ("highway", "intrinsics")),
    # The vocabulary of kernels knows no kernel; a kernel knows no other one, only the backend that launches them does.
    Rule("src/cuda/device/", ("include/", "src/cuda/call.h"), ("cuda",)),
    Rule("src/cuda/prologue/", ("include/", *CUDA_VOCABULARY), ("cuda",)),
    Rule("src/cuda/schedule/", ("include/", *CUDA_VOCABULARY), ("cuda",)),
    Rule("src/cuda/", ("include/", "src/contract/", "src/dispatch/backend.h"), ("cuda",)),
    # Few files talk to CUDA, so that the rest is the same with and without it.
    Rule("ort/cuda_", ("include/", "ort/"), ("onnxruntime", "cuda")),
    Rule("ort/", ("include/",), ("onnxruntime",)),
    Rule("python/octavo/", ("include/",), ("nanobind",)),
    Rule("examples/", ("include/",)),
    Rule("tests/install/", ("include/",)),
    # The oracle shares no arithmetic with what it judges.
    Rule("tests/reference/", ("include/", "tests/support/"), ("gtest",)),
    Rule("tests/support/", ("include/", "tests/reference/"), ("gtest", "system")),
    Rule("tests/cpu/", ("include/", "src/contract/", "src/cpu/"), ("gtest", "highway")),
    Rule("tests/cuda/", ("include/", "src/", "tests/"), ("gtest", "cuda", "system")),
    Rule("tests/", ("include/", "src/", "tests/"), ("gtest", "system")),
    Rule("tools/", ("include/", "src/dispatch/", "tests/support/")),
    Rule("bench/gpu/", ("include/",), ("cuda", "system")),
    Rule("bench/", ("include/", "tests/support/"), ("benchmark",)),
)


def name_of_foreign(path: str) -> str:
    """What an include that is not in the repository belongs to: a third party, "std", "intrinsics" or "system"."""
    for start, name in THIRD_PARTY.items():
        if path.startswith(start):
            return name
    if path.endswith("intrin.h") or path in ("arm_neon.h", "cpuid.h"):
        return "intrinsics"
    return "system" if path.endswith(".h") else "std"


def resolve(root: Path, file: str, path: str) -> str | None:
    """The repository path that an include names, or None when it is not in the repository."""
    for base in (posixpath.dirname(file), *INCLUDE_ROOTS):
        candidate = posixpath.normpath(f"{base}/{path}" if base else path)
        if (root / candidate).is_file():
            return candidate
    return None


def check_cpp(root: Path, file: str) -> Iterator[str]:
    """One message for every include of `file` that its rule does not allow."""
    rule = next((rule for rule in RULES if file.startswith(rule.where)), None)
    if rule is None:
        yield f"{file}: no rule of tools/check_layers.py covers this folder; add one"
        return
    text = (root / file).read_text(encoding="utf-8")
    for match in INCLUDE.finditer(text):
        path = match[2]
        target = resolve(root, file, path)
        if target is None:
            owner = name_of_foreign(path)
            allowed = owner == "std" or owner in rule.others
        else:
            owner = target
            allowed = target.startswith((rule.where, *rule.may))
        if not allowed:
            line = text.count("\n", 0, match.start(1)) + 1
            legal = ", ".join((*rule.may, *rule.others)) or "nothing"
            yield (
                f"{file}:{line}: includes {path} ({owner}); "
                f"beyond the standard library and itself, {rule.where} may use {legal}"
            )


def imported_names(node: ast.AST) -> list[str]:
    """Dotted names that an import statement loads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def check_python(root: Path, file: str) -> Iterator[str]:
    """One message for every import in a module of the package that breaks the rules in this file's docstring."""
    tree = ast.parse((root / file).read_text(encoding="utf-8"), file)
    # An `if TYPE_CHECKING:` block never runs.
    unexecuted = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in unexecuted:
            continue
        names = imported_names(node)
        if "octavo._core" in names and file != "python/octavo/attention.py":
            yield f"{file}:{node.lineno}: only octavo/attention.py may import the compiled extension octavo._core"
        if id(node) in top_level and any(name.split(".")[0] == "torch" for name in names):
            yield f"{file}:{node.lineno}: torch is not a dependency; import it inside the function that needs it"


def check(root: Path) -> list[str]:
    """All violations in the repository at `root`."""
    messages: list[str] = []
    for folder in ("include", "src", "ort", "python", "examples", "tests", "bench", "tools"):
        for path in sorted((root / folder).rglob("*")):
            file = path.relative_to(root).as_posix()
            if path.suffix in CPP_SUFFIXES:
                messages += check_cpp(root, file)
            elif path.suffix == ".py" and file.startswith("python/octavo/"):
                messages += check_python(root, file)
    return messages


def self_test() -> None:
    """Each rule of the kind must fire on a file that breaks it, and stay silent on one that does not."""
    import tempfile

    legal = {
        "include/octavo/a.h": "#include <string>\n",
        "src/contract/a.cc": '#include "contract/b.h"\n#include "octavo/a.h"\n',
        "src/contract/b.h": "#include <vector>\n",
        "src/cpu/a.cc": '#include "hwy/highway.h"\n#include "contract/b.h"\n',
        "ort/cuda_device.cc": '#include <cuda_runtime_api.h>\n#include "ort/device.h"\n',
        "ort/device.h": "#include <onnxruntime_c_api.h>\n",
        "tests/unit/a.cc": '#include <gtest/gtest.h>\n#include "contract/b.h"\n',
        "python/octavo/attention.py": "from octavo import _core\n",
        "python/octavo/tools.py": "def f():\n    import torch\n",
    }
    illegal = {
        "include/octavo/b.h": ("#include <cuda_runtime.h>\n", "includes cuda_runtime.h (cuda)"),
        "include/octavo/c.h": ('\n#include "contract/b.h"\n', "include/octavo/c.h:2: includes contract/b.h"),
        "src/contract/c.cc": ('#include "cpu/a.cc"\n', "includes cpu/a.cc"),
        "src/cuda/device/a.cuh": ('#include "contract/b.h"\n', "includes contract/b.h"),
        "ort/a.cc": ("#include <cuda_runtime_api.h>\n", "includes cuda_runtime_api.h (cuda)"),
        "tools/a.cc": ('#include "contract/b.h"\n', "includes contract/b.h"),
        "tests/reference/a.cc": ('#include "contract/b.h"\n', "includes contract/b.h"),
        "examples/a.cc": ('# include  "../src/contract/b.h"\n', "includes ../src/contract/b.h"),
        "src/gpu/a.cc": ("", "no rule"),
        "python/octavo/a.py": ("def f():\n    from octavo import _core\n", "only octavo/attention.py"),
        "python/octavo/b.py": ("import torch.nn\n", "torch is not a dependency"),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file, text in legal.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text, encoding="utf-8")
        if messages := check(root):
            raise SystemExit(f"self-test: legal files were refused: {messages}")
        for file, (text, expected) in illegal.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text, encoding="utf-8")
            messages = check(root)
            if len(messages) != 1 or expected not in messages[0]:
                raise SystemExit(f"self-test: {file} must give one message with {expected!r}; got {messages}")
            (root / file).unlink()


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    messages = check(ROOT)
    print("\n".join(messages) if messages else "layers: all includes and imports are as docs/architecture.md says")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
