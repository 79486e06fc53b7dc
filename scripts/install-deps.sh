#!/usr/bin/env bash
# Installs the distribution packages that quern's build needs and that are missing. Debian 12, Ubuntu 24.04 and newer.
# Says what it will install first. QUERN_NO_INSTALL=1: only says what is missing, and fails.
set -euo pipefail

packages=(g++ cmake make libfmt-dev libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev
  libedit-dev libncurses-dev libbsd-dev libmd-dev zlib1g-dev doctest-dev
  libpng-dev libjpeg-dev libwebp-dev libgif-dev
  libjs-marked node-dompurify libjs-highlight.js libjs-katex fonts-katex)
packages+=("$@")

if ! command -v dpkg-query >/dev/null; then
  echo "This is not a Debian or Ubuntu system: please install the equivalents of: ${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
# Any compiler, CMake or make on the PATH will do, packaged or not.
wanted=()
for package in "${missing[@]:+${missing[@]}}"; do
  case $package in
    g++ | cmake | make | clang | python3) command -v "$package" >/dev/null || wanted+=("$package") ;;
    *) wanted+=("$package") ;;
  esac
done
[ ${#wanted[@]} -eq 0 ] && exit 0

echo "Missing packages: ${wanted[*]}"
if [ -n "${QUERN_NO_INSTALL:-}" ]; then
  echo "Install them with: apt-get install ${wanted[*]}" >&2
  exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "Not root and no sudo: ask an administrator to install them." >&2; exit 1; }
  sudo=(sudo)
fi
echo "Installing them with apt-get${sudo:+ (through sudo)} ..."
export DEBIAN_FRONTEND=noninteractive
if ! "${sudo[@]}" apt-get install -y --no-install-recommends "${wanted[@]}" >/dev/null 2>&1; then
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y --no-install-recommends "${wanted[@]}"
fi
