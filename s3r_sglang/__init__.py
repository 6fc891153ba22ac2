"""Self-sparse speculative rollouts (S3R, arXiv 2610.13202) as a plugin of SGLang."""
