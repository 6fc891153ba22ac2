"""Reward file for OpenRLHF: `--reward.remote_url .../reward_binary.py`. 1 for a correct answer, else 0."""

from s3r_sglang.rl_integration.reward import openrlhf_reward

reward_func = openrlhf_reward(correct=1.0, incorrect=0.0)
