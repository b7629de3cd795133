"""torch's process groups of this process: left in the middle of their operations, closed, and made again with the same names and members."""
