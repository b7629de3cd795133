"""Runs of a job under a schedule of faults: the environment, one run, a whole campaign."""
