#!/usr/bin/env bash
# Start a script on several hosts. Run this on each of them:
#   NODES=2 NODE=0 HEAD=10.0.0.1 examples/multi_host.sh examples/gpt.py
#   NODES=2 NODE=1 HEAD=10.0.0.1 examples/multi_host.sh examples/gpt.py
# NODES is how many hosts there are, NODE which of them this is, HEAD the address of the first,
# PORT (29500) a free port there, RANKS (2) how many ranks each host has.
set -euo pipefail

: "${NODES:?how many hosts there are}" "${NODE:?which of them this is, from 0}"
: "${HEAD:?the address of host 0}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${RANKS:-2}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" "$@"
