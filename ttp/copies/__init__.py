"""Copies of ranks' shards in the memory of their nodes' agents, and of other nodes': for state that has no replica.

A rank writes its shards into memory that its agent owns, in slots by turns, each with a commit record. The agent's copy keeper, a process of low
priority, sends it to the next node's, and writes a checkpoint of copies when no rank has the state any more.
"""
