#!/bin/sh
# Everything that needs a GPU, in one call, on a machine that has one:
#   cmake -S . -B build/cuda -G Ninja -DOCTAVO_CUDA=ON -DOCTAVO_BUILD_TESTS=ON && cmake --build build/cuda
#   tools/gpu_check.sh [--build build/cuda] [--output docs/gpu_check.json] [--ort]
# The binaries may come from another machine of the same architecture. Fails unless all of it passes. --ort demands the
# tests through ONNX Runtime too: python3 must import onnxruntime-gpu, onnx, numpy, ml_dtypes, torch and pytest.
set -eu
cd "$(dirname "$0")/.."
exec python3 tools/gpu_check.py "$@"
