"""What load balancing over replicas is told of requests whose KV is away."""

from types import SimpleNamespace

from s3r_sglang.patches import kv_scheduling


def a_load():
    from sglang.srt.managers.load_snapshot import LoadSnapshot, QueueMetrics

    queues = QueueMetrics(waiting=4, grammar=0, paused=0, retracted=0, prealloc_ready=0)
    return LoadSnapshot(
        num_running_reqs=7,
        num_waiting_reqs=4,
        num_used_tokens=500,
        num_total_tokens=540,
        num_active_tokens=540,
        queues=queues,
    )


def test_paused_requests_are_load(plugin):
    """Two in host memory, and one on its way back, whose pages count as used already."""
    paused = [SimpleNamespace(num_pages=30), SimpleNamespace(num_pages=12)]
    core = SimpleNamespace(paused=paused, away=[*paused, SimpleNamespace(num_pages=5)])
    allocator = SimpleNamespace(s3r_kv=SimpleNamespace(core=core))
    inquirer = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    load = kv_scheduling.count_paused_in_load(a_load(), inquirer)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.queues.paused) == (7, 4 + 3, 2)
    assert (load.num_used_tokens, load.num_total_tokens, load.num_active_tokens) == (500, 582, 582)


def test_the_load_of_an_engine_without_s3r_is_left_alone(plugin):
    inquirer = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace())
    assert kv_scheduling.count_paused_in_load(a_load(), inquirer) == a_load()
