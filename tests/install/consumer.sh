#!/bin/sh
# Installs a build, then configures, builds and runs a project that finds it with find_package(octavo).
# Usage: consumer.sh BUILD_DIR WORK_DIR
set -eu
build=$1
work=$2
rm -rf "$work"
cmake --install "$build" --prefix "$work/prefix" --component development
# The public API is include/octavo and nothing else.
(cd "$work/prefix/include" && find . -name '*.h' | sort) >"$work/installed"
(cd include && find . -name '*.h' | sort) >"$work/expected"
diff "$work/expected" "$work/installed"
# A project moves: the installed files must not point into the build.
mv "$work/prefix" "$work/moved"
cmake -S tests/install -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DCMAKE_PREFIX_PATH=$PWD/$work/moved" \
  "-DOCTAVO_INSTALLED_INCLUDE_DIR=$PWD/$work/moved/include"
cmake --build "$work/build"
"$work/build/consumer"
