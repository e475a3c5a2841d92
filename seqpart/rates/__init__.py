"""Learning rates that torch's own schedulers say, and what goes with them and with averages of weights."""
