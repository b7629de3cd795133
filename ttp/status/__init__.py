"""`ttp status`: what a job does now, from its controller, or what its files know of it."""
