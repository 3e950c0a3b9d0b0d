#!/bin/sh
# Runs every fuzz target of the sanitizer build and the one of the GGUF reader, one after the other. A finding prints its
# seed and stops the run.
# Usage: fuzz.sh SECONDS_PER_TARGET [SEED]
set -eu
cd "$(dirname "$0")/.."
seconds=$1
seed=${2:-$(date +%s)}
for target in build/asan/tests/fuzz/octavo_fuzz_*; do
  [ -f "$target" ] || {
    echo "no fuzz target in build/asan: build the asan preset first" >&2
    exit 1
  }
  echo "$(basename "$target"): $seconds s from seed $seed"
  "$target" --seconds "$seconds" --seed "$seed"
done
echo "fuzz_gguf: $seconds s from seed $seed"
.venv/bin/python tests/python/fuzz_gguf.py --seconds "$seconds" --seed "$seed"
