"""Benches of the ops, correctness checked in the run that is timed."""
