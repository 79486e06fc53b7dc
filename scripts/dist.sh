#!/usr/bin/env bash
# Packs the program of a build folder with all it needs: dist.sh [BUILD]. The result is
# BUILD/dist/quern-VERSION-linux-ARCH.tar.gz, the same bytes for the same commit and compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build}")
licences_of=$build/linked-packages  # written by CMake

die() { echo "dist: $*" >&2; exit 1; }

[ -x "$build/quern" ] || die "no $build/quern; build it first"
version=$("$build/quern" --version | awk 'NR == 1 {print $2}')
name=quern-$version-linux-$(uname -m)
stage=$build/dist/$name
licences=$stage/licenses
rm -rf "$build/dist"
mkdir -p "$licences"

cmake --install "$build" --prefix "$stage" --strip >/dev/null
cp README.md LICENSE "$stage"

# Debian's copyright files have the terms in full, but for the common licences that they refer to.
copy_package_licence() {  # package, name of the copy
  local file=/usr/share/doc/$1/copyright text
  [ -r "$file" ] || die "no $file: the licence of what is linked from the package $1"
  cp -L "$file" "$licences/$2"
  for text in $(grep -oE '/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]' "$file" | sort -u); do
    mkdir -p "$licences/common-licenses"
    cp -L "$text" "$licences/common-licenses"
  done
}

copy_cuda_licence() {
  local toolkit=$1 text
  cp scripts/licenses/cuda-runtime "$licences"
  for text in "$toolkit"/EULA.txt "$toolkit"/dist-info/nvidia_cuda_runtime-*/licenses/License.txt \
    /usr/share/doc/cuda-cudart-dev-*/copyright; do
    [ -r "$text" ] || continue
    { echo; cat "$text"; } >>"$licences/cuda-runtime"
    break
  done
}

value() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

while read -r package; do copy_package_licence "$package" "$package"; done <"$licences_of"
runtime=$("$(value CMAKE_CXX_COMPILER)" -print-file-name=libstdc++.a)
package=$(dpkg -S "$(readlink -f "$runtime")" | cut -d: -f1) || die "no package has $runtime, so its licence is unknown"
copy_package_licence "$package" libstdc++-and-libgcc  # with the GCC Runtime Library Exception
cp scripts/licenses/cpp-httplib "$licences"
nvcc=$(value CMAKE_CUDA_COMPILER)
case $nvcc in *nvcc) copy_cuda_licence "$(dirname "$(dirname "$nvcc")")" ;; esac

chmod -R u=rwX,go=rX "$stage"
tar --sort=name --mtime="@$(git log -1 --format=%ct 2>/dev/null || echo 0)" --owner=0 --group=0 --numeric-owner \
  -C "$build/dist" -c "$name" | gzip -n -9 >"$stage.tar.gz"
echo "$stage.tar.gz"
