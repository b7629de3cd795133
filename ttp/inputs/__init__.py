"""Values from outside, checked: JSON, YAML, files, numbers on a command line."""
