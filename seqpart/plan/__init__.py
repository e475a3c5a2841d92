"""From checked inputs to a frozen plan: the problem, cuts, the simulator that says what each would take, the search."""
