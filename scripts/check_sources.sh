#!/usr/bin/env bash
# Checks rules of the source tree that no compiler checks; prints every finding and exits 1 if there is any.
#   check_sources.sh [ROOT]
# - docs/architecture.md and the build list every folder of src/weft, in one order; a folder includes only itself and folders above it in that list
# - folders above memory/ do not use libtorch
# - no <torch/torch.h> (14 s a file), and c10d only in comm/
# - no source file of 450 lines or more: two ideas in one room
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"
longest=450

mapfile -t map < <(sed -n 's#^  \([a-z]*\)/ .*#\1#p' docs/architecture.md)
mapfile -t sources < <(find src -name '*.h' -o -name '*.cc' | sort)

awk -v map="${map[*]}" -v longest="$longest" '
  function finding(text) { print FILENAME ":" FNR ": " text; bad = 1 }
  function report_length() { if (lines >= longest) { print last ": " lines " lines; the limit is " longest; bad = 1 } }
  BEGIN {
    count = split(map, order, " ")
    for (i = 1; i <= count; ++i) position[order[i]] = i
    first_torch = position["memory"]
    if (!first_torch) { print "docs/architecture.md: the list of folders was not found"; bad = 1 }
  }
  FNR == 1 {
    report_length()
    split(FILENAME, path, "/")
    folder = path[2] == "weft" && path[4] != "" ? path[3] : ""
    if (folder != "" && !(folder in position) && !(folder in told)) { finding("folder " folder "/ is not in docs/architecture.md"); told[folder] }
  }
  { last = FILENAME; lines = FNR }
  /^#include "weft\/[a-z]+\// {
    split($2, part, "/")
    if (folder in position && part[2] in position && position[part[2]] > position[folder]) finding(folder "/ includes " part[2] "/, which stands below it")
    if (folder in position && !(part[2] in position) && !(part[2] in told)) { finding("include of unknown folder " part[2] "/"); told[part[2]] }
  }
  /^#include [<"](torch|ATen|c10|caffe2)\// {
    if (folder in position && position[folder] < first_torch) finding(folder "/ is free of libtorch, but includes " $2)
  }
  /^#include <torch\/torch.h>/ { finding("includes <torch/torch.h>; include what is needed") }
  /csrc\/distributed\/c10d|c10d::/ && folder != "comm" { finding("c10d outside comm/") }
  END { report_length(); exit bad }
' "${sources[@]}"

# The build's order of folders is the same list.
built=$(sed -n 's/^ *weft_folder(\([a-z]*\).*/\1/p; s/^add_subdirectory(\([a-z]*\))/\1/p' src/weft/CMakeLists.txt | tr '\n' ' ')
if [ "$built" != "${map[*]} " ]; then
  printf 'src/weft/CMakeLists.txt and docs/architecture.md list different folders:\n  %s\n  %s\n' "$built" "${map[*]}"
  exit 1
fi
