"""One attempt of this node's ranks, from their start until all their processes have ended, and what all attempts share."""
