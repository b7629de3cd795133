"""What a run would need, without starting anything: `--plan` and its search."""
