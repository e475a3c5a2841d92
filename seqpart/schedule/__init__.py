"""The schedule: steps, phases, progress, length of the training and evaluations."""
