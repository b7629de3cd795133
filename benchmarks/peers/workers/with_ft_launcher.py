"""The trainer with DCP checkpoints under NVIDIA's ft_launcher: each rank sends its monitor a heartbeat after each step."""

from __future__ import annotations

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
import with_dcp

client = fault_tolerance.RankMonitorClient()
client.init_workload_monitoring()
with_dcp.train(after_step=client.send_heartbeat)
