#!/bin/sh
# Fetches the C headers of ONNX Runtime (a custom-op library links nothing of it, so headers are all that a build needs).
#
#   tools/get_onnxruntime_headers.sh DESTINATION [ARCHIVE]
#
# Leaves DESTINATION/include/onnxruntime_c_api.h (and its neighbours), or fails with the reason of every attempt.
#   1. On Debian: the package libonnxruntime-dev, taken from this machine's own mirror, out of the first release that has
#      it. The system's package lists and sources stay as they are: apt works in a folder of its own.
#   2. The release archive of the ONNX Runtime project: ARCHIVE is its URL or path.
set -eu

package=libonnxruntime-dev
first_release_with_package=trixie # Debian 13
first_version_with_package=13

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1"
destination=$(cd "$1" && pwd)
archive=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Copies the headers found below $1 to the destination, whole or not at all.
take_headers() {
  header=$(find "$1" -name onnxruntime_c_api.h | head -n 1)
  [ -n "$header" ] || { echo "no onnxruntime_c_api.h in it"; return 1; }
  rm -rf "$destination/include.part" "$destination/include"
  cp -r "$(dirname "$header")" "$destination/include.part"
  mv "$destination/include.part" "$destination/include"
}

# Writes $work/package.sources or $work/package.list: this machine's own mirror, suite $2 in the place of suite $1.
write_sources() {
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -r "$file" ] || continue
    awk -v own="$1" -v wanted="$2" '
      function flush() { if (keep) { print stanza "Suites: " wanted "\n"; found = 1 } stanza = ""; keep = 0 }
      found { exit }
      /^#/ { next }
      /^[ \t]*$/ { flush(); next }
      tolower($1) == "suites:" { for (i = 2; i <= NF; i++) if ($i == own) keep = 1; next }
      { stanza = stanza $0 "\n" }
      END { if (!found) flush() }' "$file" >"$work/package.sources"
    [ -s "$work/package.sources" ] && { echo "$work/package.sources"; return 0; }
  done
  rm -f "$work/package.sources"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -r "$file" ] || continue
    sed -n "s/^\(deb[[:space:]].*[[:space:]]\)$1\([[:space:]].*\)\$/\1$2\2/p" "$file" | head -n 1 >"$work/package.list"
    [ -s "$work/package.list" ] && { echo "$work/package.list"; return 0; }
  done
  return 1
}

from_debian() {
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "no apt-get or dpkg-deb here"
    return 1
  fi
  ID='' VERSION_CODENAME='' VERSION_ID=''
  # shellcheck source=/dev/null
  . /etc/os-release
  if [ "$ID" != debian ] || [ -z "$VERSION_CODENAME" ]; then
    echo "not a Debian release"
    return 1
  fi
  release=$first_release_with_package
  [ "${VERSION_ID:-0}" -ge "$first_version_with_package" ] && release=$VERSION_CODENAME
  sources=$(write_sources "$VERSION_CODENAME" "$release") || { echo "no package source for $VERSION_CODENAME"; return 1; }
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/deb"
  set -- -o "Dir::Etc::sourcelist=$sources" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::Lists=$work/lists" \
    -o "Dir::Cache=$work/cache" -o APT::Sandbox::User= -o Acquire::Retries=1 -o Acquire::http::Timeout=30
  apt-get "$@" update >"$work/log" 2>&1 || { tail -n 3 "$work/log"; return 1; }
  (cd "$work/deb" && apt-get "$@" download "$package") >"$work/log" 2>&1 || { tail -n 3 "$work/log"; return 1; }
  dpkg-deb -x "$work"/deb/*.deb "$work/deb/files" && take_headers "$work/deb/files"
}

from_archive() {
  [ -n "$archive" ] || { echo "no archive was named"; return 1; }
  file=$archive
  case $archive in
    *://*)
      file=$work/archive.tgz
      if command -v curl >/dev/null; then
        curl -fsSL --connect-timeout 20 -o "$file" "$archive" 2>&1 || return 1
      elif command -v wget >/dev/null; then
        wget -q -T 20 -t 2 -O "$file" "$archive" 2>&1 || { echo "wget could not fetch it"; return 1; }
      else
        echo "neither curl nor wget here"
        return 1
      fi
      ;;
  esac
  mkdir -p "$work/archive" && tar -xzf "$file" -C "$work/archive" 2>&1 && take_headers "$work/archive"
}

if debian_reason=$(from_debian); then
  exit 0
fi
if archive_reason=$(from_archive); then
  exit 0
fi
{
  echo "No ONNX Runtime headers could be fetched."
  echo "  Debian package $package: $debian_reason"
  echo "  release archive ${archive:-(none)}: $archive_reason"
} >&2
exit 1
