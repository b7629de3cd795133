"""A small trainer in Megatron's style, patched for MindIO TTP as its documentation says, with ttp.mindio in its place.

    ttprun --nproc-per-node 2 examples/megatron_style/pretrain_gpt.py --use-distributed-optimizer --save output/megatron_style --train-iters 40
    NPUS_PER_NODE=2 bash examples/megatron_style/ttprun_gpt.sh --train-iters 40
    ENABLE_TTP=False torchrun --nproc-per-node 2 examples/megatron_style/pretrain_gpt.py --save output/plain

Lines of the patch are marked `# TTP`. Model, data, schedule, checkpoint files and their names are the trainer's own.
"""

from __future__ import annotations

from minilink.arguments import parse_args
from minilink.training import pretrain

if __name__ == "__main__":
    parse_args()
    pretrain()
