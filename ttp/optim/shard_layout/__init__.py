"""Where every element of the optimizer state is stored: integer arithmetic, placement over hosts, split parameters."""
