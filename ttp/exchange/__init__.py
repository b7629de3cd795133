"""What the ranks of a job exchange at a start, with each other and with their agent: small collectives, store keys, files."""
