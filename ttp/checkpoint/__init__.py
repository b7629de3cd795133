"""Checkpoints: torch DCP format plus a manifest, written without collectives, published atomically, verified on load."""
