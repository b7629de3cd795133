"""The controller's machine: which event means what in which stage (PURE)."""
