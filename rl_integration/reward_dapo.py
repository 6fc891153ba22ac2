"""Reward file for OpenRLHF: `--reward.remote_url .../reward_dapo.py`. DAPO's 1 for a correct answer, else -1.

OpenRLHF reports the mean reward of evaluations as pass@1, which needs `reward_binary.py`. That one with
`--reward.overlong_penalty_factor 0.5` gives the advantages of this one with factor 1: they are invariant under
affine maps of the reward.
"""

from s3r_sglang.rl_integration.reward import openrlhf_reward

reward_func = openrlhf_reward(correct=1.0, incorrect=-1.0)
