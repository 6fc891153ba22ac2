"""OpenRLHF's GRPO (0.11.2) with rollouts from SGLang servers under S3R: `s3r-openrlhf`.

Two environments: the trainer's has OpenRLHF, DeepSpeed and Ray, the engine's has SGLang. Their pins of
transformers exclude each other, so they talk over HTTP and a process group. `cli` is the console script,
`environment` makes the trainer's environment, `train` is the entry in it. There, `engine` stands in for OpenRLHF's
vLLM actors, each of which owns a server (`server`, `serve`), and `trainer` for the part of its policy actor that
sends the weights.
"""
