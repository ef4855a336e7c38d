#!/usr/bin/env bash
# Installs what building Weft needs and is not there yet, and writes .deps/env.sh, which the Makefile's commands read.
# Never asks; says before what it downloads and how much; a second run finds everything and returns at once.
#
#   WEFT_TORCH           an existing libtorch >= 2.11 (the folder with include/ and lib/, or one above it) instead of a download
#   WEFT_CACHE           folder for the downloaded libtorch, shared by checkouts; default: .deps of this checkout
#   CMAKE_PREFIX_PATH, CONDA_PREFIX    are searched for dependencies, too
#
# Exit codes: 0 done, 2 something is missing that this user cannot install (the text says what would).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
top=$PWD
deps=$top/.deps
mkdir -p "$deps"
exec 8>"$deps/lock"
flock 8 # two set-ups of one checkout take turns

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

# shellcheck source=scripts/setup_libtorch.sh
. scripts/setup_libtorch.sh
# shellcheck source=scripts/setup_packages.sh
. scripts/setup_packages.sh

install_packages
install_libtorch

# Variables of the caller are read when the file is: no expansion here.
# shellcheck disable=SC2016
{
  printf 'export WEFT_TORCH=%q\n' "$torch_dir"
  if [ -d "$root" ]; then
    printf 'export PATH=%q:$PATH\n' "$root/usr/bin"
    printf 'export CMAKE_PREFIX_PATH=%q${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}\n' "$root/usr"
    printf 'export PKG_CONFIG_PATH=%q${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}\n' "$root/usr/lib/$triplet/pkgconfig:$root/usr/share/pkgconfig"
    printf 'export LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' "$root/usr/lib/$triplet:$root/lib/$triplet"
  fi
} >"$deps/env.sh.new"
mv "$deps/env.sh.new" "$deps/env.sh"
