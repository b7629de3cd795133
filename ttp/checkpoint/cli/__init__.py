"""`ttp ckpt`: the commands that look at checkpoints, compare, export and prune them."""
