"""One method in one fresh process, watched from outside, beside the others: what tools/profile_memory.py is made of."""
