"""From a fault to a published checkpoint: freeze, roll forward, write, publish, exit (PURE)."""
