"""Ranks that come, stall and die, and controllers that take over from each other (PURE)."""
