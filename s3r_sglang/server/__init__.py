"""The rollout service: complete groups over HTTP from one weight snapshot, on SGLang's own server.

`gate` decides when groups may be sampled and weights may change, `groups` samples one group, `jobs` runs the
groups of a request, `routes` is the HTTP surface and `middleware` keeps SGLang's own endpoints off a sleeping
engine. patches/http_server.py mounts it.
"""
