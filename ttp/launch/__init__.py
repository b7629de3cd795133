"""`ttprun`: torchrun that gives survivors of a fault time to save."""
