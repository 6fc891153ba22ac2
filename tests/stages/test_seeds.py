"""Seeds of requests: one each for life, and different wherever responses must be independent."""

from types import SimpleNamespace

import torch


def make_requests(*user_seeds):
    return [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=user_seed)) for user_seed in user_seeds
    ]


def admit(seeds, reqs):
    """Seeds of requests that are admitted to slots 1, 2, …"""
    slots = torch.arange(1, 1 + len(reqs))
    seeds.admit(reqs, slots)
    return seeds.of(slots).tolist()


def request_seeds(**kwargs):
    from s3r_sglang.seeds import RequestSeeds

    return RequestSeeds(7, 9, "cpu", **kwargs)


def test_requests_without_a_seed_get_different_ones():
    seeds = request_seeds()
    assert len(set(admit(seeds, make_requests(None, None)) + admit(seeds, make_requests(None, None)))) == 4


def test_a_request_keeps_its_seed_through_another_prefill():
    seeds, reqs = request_seeds(), make_requests(None, 5)
    first = admit(seeds, reqs)
    assert admit(seeds, reqs[::-1]) == first[::-1]


def test_a_seed_of_the_users_does_not_depend_on_neighbours_or_server():
    alone = admit(request_seeds(), make_requests(5))
    assert admit(request_seeds(replica=1, num_replicas=2), make_requests(None, 5))[1:] == alone


def test_replicas_share_no_seed():
    """Each replica numbers its own requests; with the same numbers, one prompt's samples would be equal."""
    replicas = [request_seeds(replica=rank, num_replicas=3) for rank in range(3)]
    drawn = {seed for seeds in replicas for seed in admit(seeds, make_requests(None, None, None, None))}
    assert len(drawn) == 12
