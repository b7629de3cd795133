"""The agent's lines to others: the controller, the other agents, and the end of the controllers."""
