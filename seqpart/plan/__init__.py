"""Planning: from checked inputs to a frozen plan, by the problem, cuts, the simulator of memory and time, and the search."""
