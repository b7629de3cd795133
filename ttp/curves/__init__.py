"""Curves of a run for TensorBoard: of the bundled trainer, and of `ttp.protect` where that is asked for."""
