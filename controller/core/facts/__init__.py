"""What the controller knows: its state, its events, and questions about them (PURE)."""
