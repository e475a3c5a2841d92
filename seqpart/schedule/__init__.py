"""Which step comes next: steps, phases, how far a run is, how long it trains and when it is tested."""
