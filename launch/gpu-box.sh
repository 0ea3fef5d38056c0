#!/usr/bin/env bash
# One machine with GPUs, this one or another: launch/gpu-box.sh [--dry-run] [--host=USER@BOX] [--dir=jaxagent] -- TRAIN ARGUMENTS
# Installs once, trains on all its GPUs in one process, and starts again what was saved on SIGTERM (exit 75).
set -euo pipefail

host='' dir=jaxagent dry=''
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --host=*) host=${1#*=} ;;
    --dir=*) dir=${1#*=} ;;
    --) shift && break ;;
    *) echo "unknown: $1 (arguments of jaxagent train follow --)" >&2 && exit 2 ;;
  esac
  shift
done
(($#)) || { echo "nothing to train: ... -- --config=FILE --workdir=DIR" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

do_it() { if [[ $dry ]]; then printf '%q ' "$@" && echo; else "$@"; fi; }
there() { if [[ $host ]]; then do_it ssh "$host" "cd $dir && $1"; else do_it bash -c "cd ${here@Q} && $1"; fi; }

if [[ $host ]]; then do_it rsync -a --exclude=.venv --exclude=runs --exclude=.git "$here/" "$host:$dir/"; fi
there "nvidia-smi --list-gpus"
there "[ -x .venv/bin/jaxagent ] || { python3 -m venv .venv && .venv/bin/pip install --quiet -e '.[gpu]'; }"
while :; do
  code=0
  there ".venv/bin/jaxagent train ${*@Q}" || code=$?
  ((code == 75)) || exit "$code"
done
