"""From checked inputs to a frozen plan."""
