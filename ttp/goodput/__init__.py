"""`python -m ttp.goodput`: how much of a cluster's time would be new steps, by a model that first reproduces published runs."""
