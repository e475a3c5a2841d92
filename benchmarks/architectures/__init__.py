"""Models that no constant of seqpart was tuned on, and rows for them: what `python -m benchmarks.prediction` predicts.

Random weights and rows: what is measured is memory. Inputs are small, so that a run takes seconds.
"""
