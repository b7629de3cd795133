"""What the operating system says about this node's ranks: deaths, exit statuses, memory, shells, stacks."""
