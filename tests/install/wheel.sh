#!/bin/sh
# `pip install .` into a clean virtual environment, then what a user does first, from another folder.
# Usage: wheel.sh WORK_DIR
set -eu
root=$PWD
mkdir -p "$1"
work=$(cd "$1" && pwd)
rm -rf "$work/venv"
"$root/.venv/bin/python" -m venv "$work/venv"
# A build folder of its own: the isolated build has another copy of nanobind than the developer's.
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "--config-settings=build-dir=$work/build" "$root"
cd "$work"
venv/bin/python "$root/examples/paged_attention.py"
venv/bin/octavo --help >/dev/null
venv/bin/python - <<'PYTHON'
import importlib.metadata
from pathlib import Path

import onnxruntime

import octavo

assert octavo.__version__ == importlib.metadata.version("octavo"), octavo.__version__
octavo.register(onnxruntime.SessionOptions())
installed = [str(path) for path in importlib.metadata.files("octavo")]
assert "octavo/py.typed" in installed, installed
unwanted = [path for path in installed if Path(path).suffix in {".cc", ".h", ".a", ".cmake"}]
assert not unwanted, unwanted
PYTHON
