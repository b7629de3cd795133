"""What ttprun reports of its job: to people on stderr, to programs in `story.jsonl`."""
