"""What belongs to a step besides weights: schedulers, seeds, and the place in the data."""
