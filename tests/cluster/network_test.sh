#!/usr/bin/env bash
# Three hosts of one machine (network name spaces on one bridge), one rank each, over gloo: the bytes that their network
# interfaces count per step are those of the formulas, for DDP and ZeRO-1, 2 and 3.
#   network_test.sh WEFT
# Needs root and ip (iproute2); says so and fails without.
set -euo pipefail
weft=$(readlink -f "$1")
lacks() { echo "network_test.sh: lacks $*"; exit 1; }
[ "$(id -u)" = 0 ] || lacks "root, to make network name spaces"
command -v ip >/dev/null || lacks "ip (apt-get install iproute2)"
ranks=3
work=$(mktemp -d)
id=weft$$
cleanup() {
  for ((r = 0; r <= ranks; r++)); do ip netns del $id-$r 2>/dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT

# Name space number $ranks holds the bridge, the others a host each with address 10.77.0.(r+1).
ip netns add $id-$ranks || lacks "the right to make network name spaces"
ip -n $id-$ranks link add bridge type bridge
ip -n $id-$ranks link set bridge up
for ((r = 0; r < ranks; r++)); do
  ip netns add $id-$r
  ip -n $id-$r link add wire type veth peer name port$r netns $id-$ranks
  ip -n $id-$r addr add 10.77.0.$((r + 1))/24 dev wire
  ip -n $id-$r link set wire up
  ip -n $id-$r link set lo up
  ip -n $id-$ranks link set port$r master bridge
  ip -n $id-$ranks link set port$r up
done

for ((i = 0; i < 4000; i++)); do echo "line $i of a text that a small model can learn, $((i * i % 97))"; done |
  "$weft" data prepare - --out "$work/data" >"$work/prepare.out" 2>&1 || { cat "$work/prepare.out"; exit 1; }
cat >"$work/config.toml" <<C
[model]
layers = 2
hidden = 192
heads = 2
[data]
train = "$work/data/train.bin"
seq = 16
[train]
global_batch = 6
threads = 1
[layout]
backend = "gloo"
C

# Bytes that the interfaces of all hosts have sent after a run of so many steps: bytes_sent ZERO STEPS
bytes_sent() {
  local r pids=() before=0 after=0
  for ((r = 0; r < ranks; r++)); do before=$((before + $(ip netns exec $id-$r cat /sys/class/net/wire/statistics/tx_bytes))); done
  for ((r = 0; r < ranks; r++)); do
    ip netns exec $id-$r env RANK=$r WORLD_SIZE=$ranks LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 \
      GLOO_SOCKET_IFNAME=wire timeout 100 "$weft" train "$work/config.toml" --set "parallel.zero=$1" --set "train.steps=$2" \
      --set "run.dir=$work/run" --set run.overwrite=true >"$work/rank$r.out" 2>&1 &
    pids+=($!)
  done
  for r in "${!pids[@]}"; do wait "${pids[$r]}" || { echo "rank $r under zero = $1 failed:" >&2; tail -20 "$work/rank$r.out" >&2; exit 1; }; done
  for ((r = 0; r < ranks; r++)); do after=$((after + $(ip netns exec $id-$r cat /sys/class/net/wire/statistics/tx_bytes))); done
  echo $((after - before))
}

parameters=$("$weft" train "$work/config.toml" --dry-run --json | sed -n 's/.*"parameters": \([0-9]*\).*/\1/p')
gradients=$((4 * parameters)) # fp32
steps=8 bad=0
echo "gradients: $gradients bytes, $ranks hosts; bytes per rank and step"
for zero in 0 1 2 3; do
  few=$(bytes_sent $zero 2)
  many=$(bytes_sent $zero $((2 + steps)))
  sent=$(((many - few) / steps / ranks))
  formula=$((2 * (ranks - 1) * gradients / ranks))
  [ $zero != 3 ] || formula=$((formula * 3 / 2))
  # Headers of Ethernet, IP and TCP and the acknowledgements are 5% of full packets; losses, norms and flags are some kilobytes.
  percent=$((100 * sent / formula))
  echo "zero = $zero: sent $sent, formula $formula, $percent%"
  if [ $percent -lt 100 ] || [ $percent -gt 110 ]; then bad=1; fi
done
[ $bad = 0 ] || { echo "the wire carries another amount than the formula says (100 to 110% are right)"; exit 1; }
