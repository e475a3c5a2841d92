"""The plan of `ist`: a cut of the whole network, for its tests, and one of its subnets, for their training."""
