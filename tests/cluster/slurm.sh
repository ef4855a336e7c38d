#!/usr/bin/env bash
# Slurm on this one machine for tests, as root: slurm.sh up|down FOLDER. Needs slurm-wlm and munge (Debian). Then
# SLURM_CONF=FOLDER/slurm.conf srun -n 2 ...   `down` stops what `up` started, a munge daemon of its own included.
set -euo pipefail
folder=$2
host=$(hostname -s)

stop() { # PIDFILE
  [ -s "$1" ] || return 0
  local pid
  pid=$(cat "$1")
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 100); do
    grep -qs '^State:.[^Z]' "/proc/$pid/status" || break
    sleep 0.1
  done
}

case $1 in
  up)
    mkdir -p "$folder"/{state,spool,run}
    if ! munge -n >/dev/null 2>&1; then
      # A key and a socket of our own: an installed munge is left as it is.
      install -d -o munge -g munge -m 755 /run/munge
      dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
      chown munge:munge "$folder/munge.key"
      chmod 400 "$folder/munge.key"
      chmod 755 "$(dirname "$folder")" "$folder"
      # As root and forced: in a container / may be writable for a group, which munge refuses.
      munged --force --key-file "$folder/munge.key" --pid-file "$folder/run/munged.pid" \
        --log-file "$folder/munged.log" --seed-file "$folder/munged.seed" 2>/dev/null
      for _ in $(seq 50); do munge -n >/dev/null 2>&1 && break; sleep 0.1; done
    fi
    port=$((20000 + RANDOM % 10000))
    memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    cat >"$folder/slurm.conf" <<C
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory
PartitionName=all Nodes=$host Default=YES State=UP
C
    export SLURM_CONF=$folder/slurm.conf
    slurmctld -f "$SLURM_CONF" -c
    slurmd -f "$SLURM_CONF"
    for _ in $(seq 100); do
      [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && exit 0
      sleep 0.2
    done
    echo "slurm.sh: the node did not become idle"
    tail -5 "$folder"/*.log
    exit 1
    ;;
  down)
    for daemon in slurmd slurmctld munged; do stop "$folder/run/$daemon.pid"; done
    ;;
esac
