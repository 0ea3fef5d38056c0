#!/usr/bin/env bash
# Several processes on this machine train as one: launch/local.sh [--dry-run] [--processes=2] [--port=8476] -- TRAIN ARGUMENTS
# What follows -- goes to `jaxagent train` untouched. Starts all again where process 0 exits with 75, unless a signal came to this
# script: then 75 is what it exits with itself, saved and to be started again by whoever sent that.
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

pids=() told=''
trap 'told=1; kill -TERM "${pids[@]}" 2> /dev/null || true' TERM INT
while :; do
  pids=()
  for ((i = 0; i < processes; i++)); do
    "${run[@]}" "${JAXAGENT:-jaxagent}" train "--coordinator=127.0.0.1:$port" "--processes=$processes" "--process=$i" "$@" &
    pids+=($!)
  done
  [[ ! $told ]] || kill -TERM "${pids[@]}" 2> /dev/null || true # a signal may come between two of these
  first=0 code=0
  for i in "${!pids[@]}"; do
    while :; do # a signal ends a wait, and not what is waited for
      wait "${pids[$i]}" && code=0 || code=$?
      kill -0 "${pids[$i]}" 2> /dev/null || break
    done
    ((i)) || first=$code
  done
  [[ $first == 75 && ! $told ]] || exit "$first"
done
