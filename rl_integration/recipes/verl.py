"""Loads SGLang's plugins, S3R among them, into the processes of verl, which does not do so itself.

verl builds SGLang's ServerArgs in its own Ray actors. It imports the modules that an environment variable names
in every one of its processes: VERL_USE_EXTERNAL_MODULES=s3r_sglang.rl_integration.recipes.verl
"""

from sglang.srt.plugins import load_plugins

load_plugins()
