"""What all of the trainer's modules stand on."""
