"""The grammar of steps, the phases that they belong to, prefetch, and learning-rate schedules."""
