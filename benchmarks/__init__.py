"""Benchmarks: what a claim costs, measured beside its limit or its baseline in the same run. `make bench` runs all."""
