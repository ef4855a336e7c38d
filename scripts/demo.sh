#!/usr/bin/env bash
# Trains a small language model on the King James Bible over two ranks and lets it speak. Expects a finished build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .deps/env.sh
weft=build/release/bin/weft

if [ ! -f data/kjv/train.bin ] || [ ! -f data/kjv/val.bin ]; then
  scripts/demo_text.sh | "$weft" data prepare - --out data/kjv --val-fraction 0.05
fi
"$weft" run -n 2 -- weft train configs/demo.toml --set run.overwrite=true "$@"
echo
"$weft" generate runs/demo --prompt "In the beginning" --tokens 300
cat <<'END'

Next:
  build/release/bin/weft generate runs/demo --prompt "And he said" --temperature 0.7
  build/release/bin/weft train --explain-config       every key with its default and meaning
  build/release/bin/weft run -n 2 -- weft train configs/demo.toml --set train.steps=3000 --set run.dir=runs/longer
END
