"""What all ranks agree on in a step: the spanning collective, clipping, the loss scale, skipped steps."""
