"""The agent's connections: to the controller, to other nodes' agents, and the shutdown of controllers."""
