"""Independent subnet training: narrow copies of the network, their neurons, and how homes are cut into theirs."""
