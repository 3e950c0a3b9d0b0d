#!/bin/sh
# Everything that needs a GPU, in one call, on a machine that has one:
#   cmake -S . -B build/cuda -G Ninja -DOCTAVO_CUDA=ON -DOCTAVO_BUILD_TESTS=ON && cmake --build build/cuda
#   tools/gpu_check.sh [--build build/cuda] [--output docs/gpu_check.json]
# The binaries may come from another machine of the same architecture. Fails unless all of it passes.
set -eu
cd "$(dirname "$0")/.."
exec python3 tools/gpu_check.py "$@"
