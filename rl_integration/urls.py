"""Addresses of rollout servers, as a trainer gives them, and how to connect to them."""

from collections.abc import Sequence

import httpx

# A connection for each request. A server closes one that was idle for 5 seconds (uvicorn's default, and how long
# httpx would keep it): a request sent at that very moment is lost, and an update or a group with it.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def base_urls(urls: str | Sequence[str]) -> list[str]:
    """One address or several, without a slash at the end; raises ValueError for none, or one that is no URL."""
    found = [urls] if isinstance(urls, str) else list(urls)
    if not found:
        raise ValueError("at least one URL is needed")
    for url in found:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise ValueError(f"{url!r} is no address of a server ({error}): write http://HOST:PORT") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{url!r} is no address of a server: write http://HOST:PORT")
    return [url.rstrip("/") for url in found]
