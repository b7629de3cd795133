"""What optimizer, gate and writer know of each other: interfaces, and the values that cross them."""
