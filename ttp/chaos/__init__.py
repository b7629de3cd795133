"""Fault injection: real faults at chosen places."""
