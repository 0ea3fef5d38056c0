#!/usr/bin/env bash
# A TPU slice, asked for and used until the run is done: launch/tpu-pod.sh [--dry-run] --name=N --zone=Z --type=v5litepod-16
#   [--version=v2-alpha-tpuv5-lite] [--project=P] [--spot] [--nfs=SERVER:/SHARE] -- TRAIN ARGUMENTS
# Waits for the queued resource, installs on all hosts, trains on all. What was saved on SIGTERM (exit 75) is started again; a
# slice that was taken away is asked for anew. The workdir must be on a file system of all hosts that outlives the slice: --nfs
# mounts one, as Filestore's, at /runs of every host.
set -euo pipefail

name='' zone='' type='' nfs='' version=v2-alpha-tpuv5-lite dry='' common=() create=()
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --nfs=*) nfs=${1#*=} nfs=${nfs%/} ;;
    --version=*) version=${1#*=} ;;
    --project=*) common+=("$1") ;;
    --spot) create+=(--spot) ;;
    --) shift && break ;;
    *) echo "unknown: $1 (arguments of jaxagent train follow --)" >&2 && exit 2 ;;
  esac
  shift
done
[[ $name && $zone && $type ]] || { echo "--name, --zone and --type are needed" >&2; exit 2; }
(($#)) || { echo "nothing to train: ... -- --config=FILE --workdir=DIR" >&2; exit 2; }
[[ ! $nfs || $nfs =~ ^[A-Za-z0-9._-]+:/[A-Za-z0-9._/-]+$ ]] || { echo "--nfs=SERVER:/SHARE wanted, got $nfs" >&2; exit 2; }
common+=("--zone=$zone" --quiet)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

cloud() { if [[ $dry ]]; then { printf '%q ' gcloud compute tpus "$@" && echo; } >&2; else gcloud compute tpus "$@"; fi; }
state() { cloud queued-resources describe "$name" "${common[@]}" '--format=value(state.state)' 2>&"$((dry ? 2 : 3))" || true; }
on_all() { cloud tpu-vm ssh "$name" "${common[@]}" --worker=all "--command=$1"; }
exec 3> /dev/null # what describe says of a resource that is not there

await_slice() {
  while :; do
    found=$(state)
    case $found in
      ACTIVE) return ;;
      '') cloud queued-resources create "$name" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$version" \
        "${create[@]}" "${common[@]}" ;;
      FAILED | SUSPENDED | SUSPENDING) # taken away, or never given
        cloud queued-resources delete "$name" "${common[@]}" --force && continue ;;
    esac
    if [[ $dry ]]; then return; fi
    sleep "${POLL_S:-30}"
  done
}

install() {
  [[ $dry ]] || tar -C "$here" -czf "$archive" jaxagent sandbox_client configs pyproject.toml README.md LICENSE constraints-3.11.txt
  cloud tpu-vm scp "$archive" "$name:jaxagent.tgz" "${common[@]}" --worker=all &&
    on_all "mkdir -p jaxagent && tar -C jaxagent -xzf jaxagent.tgz && cd jaxagent && { command -v python3.11 > /dev/null || \
sudo apt-get install -y -q python3.11-venv; } && { [ -x .venv/bin/jaxagent ] || { python3.11 -m venv .venv && \
.venv/bin/pip install --quiet -c constraints-3.11.txt -e '.[tpu]'; }; }"
}

share() { # there already where the slice is the same
  [[ ! $nfs ]] || on_all "{ findmnt -n -t nfs,nfs4 -S $nfs /runs > /dev/null || { \
{ command -v mount.nfs > /dev/null || sudo apt-get install -y -q nfs-common; } && sudo mkdir -p /runs && \
sudo mount -t nfs $nfs /runs; }; } && { [ -w /runs ] || sudo chown \$USER /runs; }"
}

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
while :; do
  await_slice
  { share && install; } || { [[ $(state) != ACTIVE ]] || exit 1; } # taken away meanwhile, or it cannot be installed
  # ssh to many hosts does not say how each command ended: the first host writes it down.
  on_all "cd jaxagent && rm -f code; .venv/bin/jaxagent train ${*@Q}; echo \$? > code" || true
  code=$(cloud tpu-vm ssh "$name" "${common[@]}" --worker=0 --command='cat jaxagent/code' || true)
  if [[ $dry ]]; then exit 0; fi
  if [[ $code == 75 ]]; then continue; fi
  if [[ $(state) == ACTIVE ]]; then exit "${code:-1}"; fi
done
