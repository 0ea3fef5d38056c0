#!/usr/bin/env bash
# Applies gke-jobset.yaml: launch/gke.sh [--dry-run] --image=IMAGE [--hosts=4] [--topology=4x4] [--accelerator=tpu-v5-lite-podslice]
#   -- TRAIN ARGUMENTS          A job that is there is replaced; the same workdir goes on.
set -euo pipefail

image='' hosts=4 topology=4x4 accelerator=tpu-v5-lite-podslice dry=''
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --image=*) image=${1#*=} ;;
    --hosts=*) hosts=${1#*=} ;;
    --topology=*) topology=${1#*=} ;;
    --accelerator=*) accelerator=${1#*=} ;;
    --) shift && break ;;
    *) echo "unknown: $1 (arguments of jaxagent train follow --)" >&2 && exit 2 ;;
  esac
  shift
done
[[ $image ]] || { echo "--image is needed" >&2; exit 2; }
(($#)) || { echo "nothing to train: ... -- --config=FILE --workdir=DIR" >&2; exit 2; }

# A marked line keeps what stands before its value; strings and lists are written as JSON, which YAML reads.
manifest=$(python3 - "$(dirname "${BASH_SOURCE[0]}")/gke-jobset.yaml" "$hosts" "$topology" "$accelerator" "$image" "$@" << 'FILL'
import json, re, sys

path, hosts, topology, accelerator, image, *arguments = sys.argv[1:]
values = {"topology": topology, "accelerator": accelerator, "image": image, "arguments": arguments}
for line in open(path).read().splitlines():
    if marked := re.fullmatch(r"( *(?:\S+): )(.*) # (\w+)", line):
        key, old, name = marked.groups()
        new = (json.dumps(hosts) if old.startswith('"') else hosts) if name == "hosts" else json.dumps(values[name])
        line = f"{key}{new} # {name}"
    print(line)
FILL
)
if [[ $dry ]]; then
  echo "kubectl delete jobset/jaxagent --ignore-not-found --wait && kubectl apply -f -"
  echo "$manifest"
else
  kubectl delete jobset/jaxagent --ignore-not-found --wait
  echo "$manifest" | kubectl apply -f -
fi
