#!/usr/bin/env bash
# weft train under a launcher gives the same losses as under weft run.
#   launcher_test.sh WEFT torchrun|mpirun|srun|small_shm
# Says what it lacks and fails when the launcher is not there: who asks for the label `launchers` wants to know.
# mpirun: openmpi-bin. srun: slurm-wlm and munge, started on this machine by slurm.sh (needs root). torchrun: a Python with
# torch, named by WEFT_PYTHON. small_shm: root, for a /dev/shm of 64 MB (Docker's default) in a mount name space of its own.
set -euo pipefail
weft=$(readlink -f "$1") kind=$2
here=$(dirname "$(readlink -f "$0")")
work=$(mktemp -d)
cleanup() { [ ! -d "$work/slurm" ] || "$here/slurm.sh" down "$work/slurm"; rm -rf "$work"; }
trap cleanup EXIT
lacks() { echo "launcher_test.sh $kind: lacks $*"; exit 1; }
ranks=2

for ((i = 0; i < 4000; i++)); do echo "line $i of a text that a small model can learn, $((i * i % 97))"; done |
  "$weft" data prepare - --out "$work/data" --val-fraction 0.1 >"$work/prepare.out" 2>&1 || { cat "$work/prepare.out"; exit 1; }
cat >"$work/config.toml" <<C
[model]
layers = 1
hidden = 32
heads = 2
[data]
train = "$work/data/train.bin"
val = "$work/data/val.bin"
seq = 32
[train]
steps = 6
global_batch = 4
C
train() { # NAME LAUNCHER... : runs it, and leaves the losses in NAME.loss
  local name=$1
  shift
  timeout 100 "$@" "$weft" train "$work/config.toml" --set "run.dir=$work/$name" >"$work/$name.out" 2>&1 ||
    { echo "$name failed:"; tail -30 "$work/$name.out"; exit 1; }
  grep -o '"loss":[^,}]*' "$work/$name/metrics.jsonl" >"$work/$name.loss"
}

train reference "$weft" run -n $ranks --
case $kind in
  torchrun)
    python=${WEFT_PYTHON:-python3}
    "$python" -c 'import torch' 2>/dev/null || lacks "a Python with torch (set WEFT_PYTHON)"
    train other "$python" -m torch.distributed.run --standalone --nproc-per-node $ranks --no-python
    ;;
  mpirun)
    command -v mpirun >/dev/null || lacks "mpirun (apt-get install openmpi-bin)"
    root=()
    [ "$(id -u)" != 0 ] || root=(--allow-run-as-root)
    train other mpirun "${root[@]}" --oversubscribe --bind-to none -n $ranks
    ;;
  srun)
    command -v srun >/dev/null && command -v munged >/dev/null || lacks "srun (apt-get install slurm-wlm munge)"
    [ "$(id -u)" = 0 ] || lacks "root, to start Slurm on this machine"
    mkdir "$work/slurm"
    "$here/slurm.sh" up "$work/slurm"
    export SLURM_CONF=$work/slurm/slurm.conf
    train other srun -n $ranks --overcommit
    ;;
  small_shm)
    [ "$(id -u)" = 0 ] || lacks "root, to mount a small /dev/shm"
    unshare -m true 2>/dev/null || lacks "mount name spaces (unshare -m)"
    train other unshare -m sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"' sh "$weft" run -n $ranks --
    ;;
  *) lacks "a launcher named $kind" ;;
esac
[ -s "$work/other.loss" ] || { echo "no losses under $kind"; exit 1; }
[ "$(wc -l <"$work/other.loss")" -ge 6 ] || { echo "too few steps under $kind"; cat "$work/other.loss"; exit 1; }
diff "$work/reference.loss" "$work/other.loss" || { echo "losses differ between weft run and $kind"; exit 1; }
echo "$kind: losses equal those of weft run"
