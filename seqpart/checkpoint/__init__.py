"""The directory of a run, and what it saves and resumes from; the weights that it exports."""
