"""Mount the rollout service on SGLang's FastAPI application."""

import sys


def mount_rollout_service(_, server_args=None) -> None:
    """After `set_uvicorn_logging_configs`, SGLang's last call before it listens.

    A hook on the HTTP server module itself would make each scheduler process import it, 6 s on a busy machine.
    With several tokenizer processes there is none that knows all groups in flight, so there is no service.
    """
    from s3r_sglang.config import serves_rollouts

    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is None or server_args is None or server_args.tokenizer_worker_num > 1:
        return
    if serves_rollouts(server_args):
        from s3r_sglang.server.routes import mount

        mount(http_server.app, http_server.get_global_state())
