"""Nodes on one machine, made of network namespaces, with cables that can be slowed and pulled."""
