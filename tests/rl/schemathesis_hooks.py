"""Loaded by Schemathesis (SCHEMATHESIS_HOOKS): keeps what it asks for small, and what is wrong as it is."""

import schemathesis

RESPONSES = 2
TOKENS = 4


def _limit(fields, name, most, largest):
    value = fields.get(name)
    if type(value) is int and 1 <= value <= largest:
        fields[name] = min(value, most)


@schemathesis.hook
def map_body(context, body):
    """At most two responses of four tokens a prompt: a valid request may ask for a thousand of any length."""
    if isinstance(body, dict) and "prompts" in body:
        _limit(body, "group_size", RESPONSES, 1024)
        sampling = body.setdefault("sampling", {"max_new_tokens": TOKENS})
        prompts = body["prompts"] if isinstance(body["prompts"], list) else []
        for fields in (sampling, *prompts):
            if isinstance(fields, dict):
                _limit(fields, "max_new_tokens", TOKENS, 2**63)
    return body
