"""Is this node fit for ranks? `--health-check`: before it is seated, and after each fault on it."""
