#!/usr/bin/env bash
# Several processes on this machine train as one: launch/local.sh [--dry-run] [--processes=2] [--port=8476] -- TRAIN ARGUMENTS
# What follows -- goes to `jaxagent train` untouched. Exits as process 0 does: 75 is saved and to be started again.
set -euo pipefail

processes=2 port=8476 run=()
while (($#)); do
  case $1 in
    --dry-run) run=(echo) ;;
    --processes=*) processes=${1#*=} ;;
    --port=*) port=${1#*=} ;;
    --) shift && break ;;
    *) echo "unknown: $1 (arguments of jaxagent train follow --)" >&2 && exit 2 ;;
  esac
  shift
done
(($#)) || { echo "nothing to train: ... -- --config=FILE --workdir=DIR" >&2; exit 2; }

pids=()
trap 'kill -TERM "${pids[@]}" 2> /dev/null || true' TERM INT
for ((i = 0; i < processes; i++)); do
  "${run[@]}" "${JAXAGENT:-jaxagent}" train "--coordinator=127.0.0.1:$port" "--processes=$processes" "--process=$i" "$@" &
  pids+=($!)
done
first=0 code=0
for i in "${!pids[@]}"; do
  while :; do # a signal ends a wait, and not what is waited for
    wait "${pids[$i]}" && code=0 || code=$?
    kill -0 "${pids[$i]}" 2> /dev/null || break
  done
  ((i)) || first=$code
done
exit "$first"
