"""Warm starts: processes forked from one that has imported what they will import.

The agent starts the servers: one with torch for the workers, a small one for the controllers.
"""
