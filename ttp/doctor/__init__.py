"""`ttp doctor`: what a long run relies on, looked at before it: directories, network, limits, clocks, the layout."""
