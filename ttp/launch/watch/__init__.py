"""The state of this node's ranks by the operating system: deaths, exit statuses, memory, shells, stacks."""
