"""Plain PyTorch references: the same names and signatures as the ops."""
