"""Copies of checkpoints in an object store: uploaded beside training, fetched when the directories are lost, looked at by `ttp ckpt`."""
