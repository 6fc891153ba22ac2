"""Public kernel wrappers, each with its private kernel in the same module."""
