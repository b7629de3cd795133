"""The devices that the trainer knows, and binding a rank to one."""
