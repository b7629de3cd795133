"""A rank's machine: what each event and order means to it (PURE)."""
