"""Checkpoints where each node has directories of its own: published in parts, found together, moved where they are needed."""
