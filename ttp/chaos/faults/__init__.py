"""Faults: how people write them, and how they are carried out, inside a rank and from outside."""
