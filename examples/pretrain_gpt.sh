#!/usr/bin/env bash
# Pretrains a GPT on one node or several: run it on each, with NODE_RANK set (0 to NNODES - 1), or give RANK_TABLE_FILE.
#
#   bash examples/pretrain_gpt.sh                                             # one node, 8 GPUs
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash examples/pretrain_gpt.sh   # the second of two
#   RANK_TABLE_FILE=hccl.json bash examples/pretrain_gpt.sh                   # nodes and ranks from the table
#
# Further arguments go to the trainer, after those below, e.g. --training_config.training_iters=100.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export TTP_OT=${TTP_OT:-120}

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:-}
OUTPUT_PATH=${OUTPUT_PATH:-./output}

if [ -n "${RANK_TABLE_FILE:-}" ]; then
    DISTRIBUTED_ARGS=(--rank_table_file "$RANK_TABLE_FILE" --master-port "$MASTER_PORT")
else
    DISTRIBUTED_ARGS=(
        --nproc-per-node "$GPUS_PER_NODE"
        --nnodes "$NNODES"
        --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR"
        --master-port "$MASTER_PORT"
        --max-restarts "${MAX_RESTARTS:-3}"
    )
fi

GPT_MODEL_ARGS=(
    --config "${CONFIG:-gpt2_124m}"
    --model_config.seq_length "${SEQ_LENGTH:-1024}"
)

TRAINING_ARGS=(
    --dataset_config.batch_size "${MICRO_BATCH_SIZE:-4}"
    --dataset_config.micro_batch_num "${MICRO_BATCH_NUM:-1}"
    --training_config.training_iters "${TRAIN_ITERS:-1000}"
    --optimizer_config.learning_rate "${LR:-3.0e-4}"
)

OUTPUT_ARGS=(
    --training_config.output_dir "$OUTPUT_PATH"
    --training_config.log_interval "${LOG_INTERVAL:-10}"
    --training_config.save_interval "${SAVE_INTERVAL:-500}"
)

if [ -n "$DATA_PATH" ]; then
    TRAINING_ARGS+=(--dataset_config.dataset_dir "$DATA_PATH")
fi

exec ttprun "${DISTRIBUTED_ARGS[@]}" \
    -m ttp.trainer \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@"
