"""Names, addresses, interfaces and the interconnect of a node."""
