"""Prompts with answers for training and evaluation, made from the data sets of the paper (appendix C)."""
