#!/bin/sh
# Checks a liboctavo_ort.so with the CUDA backends inside: that it needs no library of CUDA's to be loaded, so that it
# serves CPUs where there is none, that it exports nothing but its entry, and that it keeps within its size.
# Usage: cuda_library.sh LIBRARY
set -eu
library=$1
max_stripped_bytes=62914560 # 60 MiB

fail() {
  echo "$library: $1" >&2
  exit 1
}

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[ -n "$needed" ] || fail "readelf finds no NEEDED entry: not a shared library?"
for name in $needed; do
  case $name in
    libcu* | libnv*) fail "needs $name, which a machine without a GPU does not have" ;;
  esac
done
exported=$(nm -D --defined-only "$library" | awk '$2 ~ /[A-Z]/ { print $3 }' | sed 's/@.*//' | sort -u | tr '\n' ' ')
[ "$exported" = "RegisterCustomOps " ] || fail "must export RegisterCustomOps alone, exports: $exported"
# A build without kernels would pass everything else.
strings -a "$library" | grep -q cuda_general || fail "has no CUDA backend inside"

stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip -o "$stripped" "$library"
bytes=$(wc -c <"$stripped")
[ "$bytes" -le "$max_stripped_bytes" ] || fail "has $bytes bytes when stripped, more than $max_stripped_bytes"
echo "$library: $bytes bytes when stripped; needs $(echo "$needed" | tr '\n' ' ')"
