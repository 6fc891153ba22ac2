"""What OpenRLHF imports of flash-attn at module level, for an environment without it.

Only packing and ring attention call these, and `compat` refuses both where flash-attn is missing.
"""
