"""`ttp ckpt`: list, inspect, verify, diff, export, prune and sign checkpoints."""
