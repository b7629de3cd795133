"""`ttp ckpt`: list, inspect, verify, diff, export and prune checkpoints."""
