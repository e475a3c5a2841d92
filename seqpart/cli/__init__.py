"""The command line: options, jobs and doctor."""
