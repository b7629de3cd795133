"""Was all as it should be? One fault with what came of it, the invariants, equality to the bit."""
