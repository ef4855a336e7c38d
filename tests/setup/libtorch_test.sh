#!/usr/bin/env bash
# scripts/setup_libtorch.sh: finds a libtorch in every layout, and refuses an unfit one with all that is wrong with it.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../scripts" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# make_libtorch FOLDER VERSION: looks like a fit one. `true` stands for the libraries, so that the linker's view is real.
make_libtorch() {
  local dir=$1 version=$2 file
  mkdir -p "$dir/lib"
  for file in torch/headeronly/version.h torch/csrc/distributed/c10d/Backend.hpp torch/csrc/api/include/torch/nn/module.h ATen/ATen.h; do
    mkdir -p "$dir/include/$(dirname "$file")"
    touch "$dir/include/$file"
  done
  # shellcheck disable=SC2086 # three numbers
  printf '#define TORCH_VERSION_MAJOR %d\n#define TORCH_VERSION_MINOR %d\n#define TORCH_VERSION_PATCH %d\n' ${version//./ } \
    >"$dir/include/torch/headeronly/version.h"
  { cat "$(type -P true)"; echo c10d16ProcessGroupGloo; } >"$dir/lib/libtorch_cpu.so"
  { cat "$(type -P true)"; echo NSt7__cxx1112basic_string; } >"$dir/lib/libc10.so"
}

# setup FOLDER: what setup.sh does with WEFT_TORCH=FOLDER; prints the folder it settled on.
setup() {
  rm -rf "$work/deps"
  mkdir -p "$work/deps"
  # shellcheck disable=SC2016 # expanded by the inner shell
  WEFT_TORCH=$1 deps=$work/deps bash -c '
    set -euo pipefail
    say() { printf "setup: %s\n" "$*" >&2; }
    fail() { say "$*"; exit 2; }
    . "$0/setup_libtorch.sh"
    install_libtorch
    echo "$torch_dir"' "$scripts" 2>"$work/err"
}

# accepted NAMED FOUND
accepted() {
  local found
  found=$(setup "$1") || { echo "refused: $1"; cat "$work/err"; exit 1; }
  [ "$found" = "$(realpath "$2")" ] || { echo "took $found for $1, not $2"; exit 1; }
}

# refused NAMED WANTED...: exit code 2, with every text
refused() {
  local named=$1 code=0 wanted
  shift
  setup "$named" >"$work/out" || code=$?
  [ "$code" = 2 ] || { echo "exit code $code for $named, not 2"; cat "$work/err"; exit 1; }
  for wanted in "$named" "$@"; do
    grep -qF -- "$wanted" "$work/err" || { printf 'wanted: %s\nfound:  %s\n' "$wanted" "$(cat "$work/err")"; exit 1; }
  done
}

make_libtorch "$work/wheel/torch" 2.15.0
accepted "$work/wheel/torch" "$work/wheel/torch"
accepted "$work/wheel" "$work/wheel/torch"
make_libtorch "$work/zip/libtorch" 2.11.0
accepted "$work/zip" "$work/zip/libtorch"
make_libtorch "$work/env/lib/python3.12/site-packages/torch" 2.100.1
accepted "$work/env" "$work/env/lib/python3.12/site-packages/torch"
# A source build installs into a prefix.
make_libtorch "$work/prefix" 2.15.0
accepted "$work/prefix" "$work/prefix"

make_libtorch "$work/old" 2.10.3
refused "$work/old" "version 2.10.3 is older than 2.11"

make_libtorch "$work/bad" 2.9.1
rm "$work/bad/include/torch/csrc/distributed/c10d/Backend.hpp" "$work/bad/include/ATen/ATen.h"
cp "$(type -P true)" "$work/bad/lib/libc10.so"
cp "$(type -P true)" "$work/bad/lib/libtorch_cpu.so"
refused "$work/bad" "built without distributed support" "include/ATen/ATen.h is missing" "version 2.9.1 is older" \
  "old C++ ABI" "holds no Gloo back end"

make_libtorch "$work/ancient" 2.15.0
rm "$work/ancient/include/torch/headeronly/version.h"
refused "$work/ancient" "older than 2.11, which Weft needs"

# Text instead of a library: a pointer of a large-file store, or a download that was cut.
make_libtorch "$work/text" 2.15.0
echo "version https://git-lfs.github.com/spec/v1" >"$work/text/lib/libtorch_cpu.so"
refused "$work/text" "lib/libtorch_cpu.so is not a shared library"

mkdir "$work/empty"
refused "$work/empty" "lib/libtorch_cpu.so is missing" "lib/libc10.so is missing"
refused "$work/nowhere" "lib/libtorch_cpu.so is missing"
