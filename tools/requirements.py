"""Print pyproject.toml's requirements, one a line: the package's own, plus the named groups.

build is [build-system].requires; any other name is a group of [project.optional-dependencies].
Usage: requirements.py [GROUP ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(groups: list[str]) -> list[str]:
    """The requirements of the package and of `groups`, sorted. Raises KeyError for an unknown group."""
    pyproject = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = pyproject["project"]
    found = set(project["dependencies"])
    for group in groups:
        rows = pyproject["build-system"]["requires"] if group == "build" else project["optional-dependencies"][group]
        found.update(rows)
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
