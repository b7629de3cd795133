#!/usr/bin/env bash
# Pretrains a GPT on the visible devices of one node or several: run it on each node.
#
#   bash examples/gpt/pretrain_gpt.sh                                      # pretrain_gpt_7B.yaml beside this script
#   bash examples/gpt/pretrain_gpt.sh xx.yaml                              # another configuration
#   ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 bash examples/gpt/pretrain_gpt.sh    # four devices, one rank each
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash examples/gpt/pretrain_gpt.sh    # the second of two nodes
#   RANK_TABLE_FILE=hccl.json bash examples/gpt/pretrain_gpt.sh            # nodes and ranks from the table
#
# Further arguments change keys of the configuration: --training_config.training_iters 100.
set -euo pipefail

export HCCL_BUFFSIZE=${HCCL_BUFFSIZE:-200}         # MB of a buffer between two NPUs
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-600} # seconds that NPUs wait for each other
export ASCEND_RT_VISIBLE_DEVICES=${ASCEND_RT_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$ASCEND_RT_VISIBLE_DEVICES} # the same devices, where they are GPUs

# CUDA_DEVICE_MAX_CONNECTIONS stays unset. Megatron-LM's scripts set 1: then all streams share one hardware queue, and at a fault the
# copies of the emergency checkpoint may wait behind a collective that never ends. `python -m ttp.selftest --device cuda` shows it.

port=${MASTER_PORT:-8828}
log_path="msrun_log"
project_dir=$(cd "$(dirname "$0")" && pwd)

config_path="$project_dir/pretrain_gpt_7B.yaml"
if [[ $# -gt 0 && $1 != --* ]]; then
    config_path=$1
    shift
fi

if [ -n "${RANK_TABLE_FILE:-}" ]; then
    ranks=(--rank_table_file "$RANK_TABLE_FILE" --tee 3)
else
    IFS=',' read -r -a devices <<<"$ASCEND_RT_VISIBLE_DEVICES"
    work_num=${#devices[@]}
    ranks=(--worker_num "$((work_num * ${NNODES:-1}))" --local_worker_num="$work_num")
    ranks+=(--master_addr="${MASTER_ADDR:-127.0.0.1}" --node_rank="${NODE_RANK:--1}")
fi

if [[ ${NNODES:-1} == 1 && -z ${RANK_TABLE_FILE:-} ]]; then
    rm -rf "$log_path" # of several nodes the folder may be one: each attempt has a folder of its own in it
fi
mkdir -p "$log_path"
exec ttprun "${ranks[@]}" --master_port="$port" --log_dir="$log_path" --join=True --cluster_time_out=300 \
    "$project_dir/pretrain_gpt.py" --config_path="$config_path" "$@"
