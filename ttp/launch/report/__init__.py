"""What ttprun reports: to people on stderr, to programs in `story.jsonl`."""
