#!/usr/bin/env bash
# A user without root clones the project into an empty folder, sets it up and configures the build.
#   WEFT_TORCH   an existing libtorch that everybody may read; without it the set-up downloads one (553 MB)
# Fails when it cannot run, and says what it lacks.
set -euo pipefail
source_tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
lacking() { echo "cannot run: $*"; exit 1; }

command -v git >/dev/null || lacking "git is needed to clone"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
as_user=()
if [ "$(id -u)" = 0 ]; then
  command -v setpriv >/dev/null || lacking "setpriv (util-linux) is needed to give up root, or run this as another user"
  as_user=(setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs)
fi
if [ -n "${WEFT_TORCH:-}" ] && ! "${as_user[@]}" test -r "$WEFT_TORCH/lib/libtorch_cpu.so"; then
  lacking "WEFT_TORCH=$WEFT_TORCH cannot be read by a user without root"
fi

git clone -q "$source_tree" "$work/weft"
# What is not committed yet is part of what is tested.
git -C "$source_tree" diff --binary HEAD | git -C "$work/weft" apply --allow-empty
mkdir "$work/home"
if [ ${#as_user[@]} -gt 0 ]; then chown -R 65534:65534 "$work"; fi
cd "$work/weft"
# Nothing of the caller's environment but the libtorch.
user() { "${as_user[@]}" env -i "HOME=$work/home" "PATH=/usr/local/bin:/usr/bin:/bin" "LANG=C.UTF-8" ${WEFT_TORCH:+"WEFT_TORCH=$WEFT_TORCH"} "$@"; }

user id -un 2>/dev/null || user id -u
user make setup
[ -f .deps/env.sh ] || { echo "no .deps/env.sh"; exit 1; }
user make setup 2>"$work/second"
[ ! -s "$work/second" ] || { echo "a second set-up finds something to do:"; cat "$work/second"; exit 1; }
user make configure
user bash -c '. .deps/env.sh && cmake --build --preset release -j 1 --target test_unit_layout && build/release/bin/test_unit_layout' | tail -n 1
if user git status --porcelain | grep '^??'; then echo "the set-up left these files, which git sees"; exit 1; fi
