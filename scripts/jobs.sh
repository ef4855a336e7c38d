#!/usr/bin/env bash
# Prints how many compilers may run at a time: one a core, each with 2 GB of memory (a file that includes libtorch takes 1.3).
cores=$(nproc)
by_memory=$(awk '/^MemAvailable/ {print int($2 / 2e6)}' /proc/meminfo)
jobs=$((cores < by_memory ? cores : by_memory))
echo $((jobs > 1 ? jobs : 1))
