"""Checkpoints: torch DCP format plus a manifest, written without collectives, published at once, verified on load."""
