"""What the ranks of a job exchange at an attempt's startup, with each other and with their agent: small collectives, store keys, files."""
