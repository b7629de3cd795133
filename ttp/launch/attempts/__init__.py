"""One attempt of this node's ranks, from their start to the last trace of them, and what all attempts share."""
