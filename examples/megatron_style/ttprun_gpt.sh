#!/usr/bin/env bash
# The trainer's launch script after the patch: run it on each node, with NODE_RANK set (0 to NNODES - 1).
#
#   bash examples/megatron_style/ttprun_gpt.sh                                               # one node, 8 devices
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash examples/megatron_style/ttprun_gpt.sh     # the second of two
#   bash examples/megatron_style/ttprun_gpt.sh --local-copy-os                               # with the state of the step before
#
# For an odd NPUS_PER_NODE apply odd_sizes.patch first. Further arguments go to the trainer. Lines of the patch are marked
# `# TTP`. On several nodes name the network card as well (export GLOO_SOCKET_IFNAME=enp189s0f0); they share CHECKPOINT_PATH and
# TTP_MINDIO_DIR.
set -euo pipefail

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_PORT=${MASTER_PORT:-6000}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-./output/megatron_style}

export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} # TTP: the trainer gives it to the controller
export TTP_OT=${TTP_OT:-360}                 # TTP: seconds for all that a fault takes, until the ranks have left
export ENABLE_TTP=${ENABLE_TTP:-True}        # TTP: False is the trainer as it was

# TTP: no CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM's own scripts have it: with one hardware queue the copies of the emergency checkpoint
# may wait behind a collective that never ends. Where tensor parallelism needs it, such a fault may cost the steps since the newest checkpoint.

DISTRIBUTED_ARGS="--nproc_per_node $NPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

# TTP: ttprun in place of torchrun
ttprun $DISTRIBUTED_ARGS \
    "$(dirname "$0")/pretrain_gpt.py" \
    --use-distributed-optimizer \
    --save $CHECKPOINT_PATH \
    "$@"
