#!/usr/bin/env bash
# check_sources.sh finds each kind of fault in a small tree made for it, and nothing in a good one.
set -euo pipefail
check=$(cd "$(dirname "${BASH_SOURCE[0]}")/../scripts" && pwd)/check_sources.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree"/docs "$tree"/src/weft/{core,memory,comm,nn}
printf '  core/    c\n  memory/  m\n  comm/    c\n  nn/      n\n' >"$tree/docs/architecture.md"
printf '#include "weft/core/a.h"\n#include "weft/comm/a.h"\n' >"$tree/src/weft/nn/a.h"
printf '#include <torch/csrc/distributed/c10d/Backend.hpp>\n' >"$tree/src/weft/comm/a.h"
printf 'weft_folder(core)\n  weft_folder(memory)\nweft_folder(comm DEPENDS core)\nweft_folder(nn)\n' >"$tree/src/weft/CMakeLists.txt"
"$check" "$tree" || { echo "a good tree was refused"; exit 1; }

# expect NAME TEXT WANTED: a tree with one more file is refused with that text
expect() {
  local file=$tree/src/weft/$1 found
  mkdir -p "$(dirname "$file")"
  printf '%b' "$2" >"$file"
  if found=$("$check" "$tree"); then echo "not found: $3"; exit 1; fi
  grep -qF -- "$3" <<<"$found" || { printf 'wanted: %s\nfound:  %s\n' "$3" "$found"; exit 1; }
  rm "$file"
  rmdir --ignore-fail-on-non-empty "$(dirname "$file")"
}
expect core/b.h '#include "weft/comm/a.h"\n' 'core/ includes comm/, which stands below it'
expect core/b.h '#include <ATen/core/Tensor.h>\n' 'core/ is free of libtorch'
expect nn/b.cc '#include <torch/torch.h>\n' 'includes <torch/torch.h>'
expect nn/b.cc 'c10d::Store* s;\n' 'c10d outside comm/'
expect nn/b.cc '#include "weft/nowhere/a.h"\n' 'include of unknown folder nowhere/'
expect other/b.h 'int x;\n' 'folder other/ is not in docs/architecture.md'
expect nn/b.cc "$(printf 'x\\n%.0s' {1..450})" '450 lines; the limit is 450'
printf 'weft_folder(late)\n' >>"$tree/src/weft/CMakeLists.txt"
expect nn/b.cc '' 'list different folders'
