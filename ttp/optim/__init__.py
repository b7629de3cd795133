"""Optimizers that keep every shard of their state on several ranks."""
