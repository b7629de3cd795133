"""The trainer's own save and rename handlers, called at a fault on the ranks that save."""
