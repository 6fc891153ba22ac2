"""Runnable examples: python -m s3r_sglang.rl_integration.examples.grpo --help."""
