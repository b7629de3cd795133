"""How the agents of a job meet: the stores, torch's handlers around them, static jobs, rank tables."""
