#!/usr/bin/env bash
# Prints the King James Bible (Debian packages bible-kjv, bible-kjv-text) as plain text: a verse a line without its
# number, a blank line between chapters.
set -euo pipefail
bible -f Gen1:1-Rev22:21 | awk '{
  chapter = $1; sub(/:.*/, "", chapter)
  if (NR > 1 && chapter != last) print ""
  last = chapter
  sub(/^[^ ]* /, ""); print
}'
