"""What a patched ModelLink imports from `mindio_ttp.modellink`."""

from ttp.mindio.modellink.os_shard_parallel import (
    build_optimizer_replica_group,
    get_dp_rank_list,
    get_os_shard_group,
    set_parallel_state,
)
from ttp.mindio.optimizer import (
    DistributedOptimizerWithoutFP32Grad,
    OddDistributedOptimizerWithoutFP32Grad,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)

__all__ = [
    "DistributedOptimizerWithoutFP32Grad",
    "OddDistributedOptimizerWithoutFP32Grad",
    "TTPOddReplicaOptimizer",
    "TTPReplicaOptimizer",
    "build_optimizer_replica_group",
    "get_dp_rank_list",
    "get_os_shard_group",
    "set_parallel_state",
]
