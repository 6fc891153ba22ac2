"""Facade of the kernel packages: public ops, their plain PyTorch references, and their benches."""
