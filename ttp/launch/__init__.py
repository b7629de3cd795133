"""`ttprun`: torchrun that gives survivors the time to persist."""
