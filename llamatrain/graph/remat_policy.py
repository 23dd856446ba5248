"""Recomputation policies as text: `block:3,wide:2` recomputes all of three blocks, and what is wide of two more.

The ways to recompute a block, each recomputing more than the one before: nothing; what is light; of products,
what is wider than a block's input; all but attention; everything. In a segment of several blocks, only the
first one's input is kept; the others' are recomputed before their blocks are.
"""

from collections.abc import Sequence

from llamatrain.errors import GraphError

Policy = str | int
# or a number: recompute that many blocks, and light in the others
POLICY_NAMES = ("none", "light", "block", "optimal")
WAYS = ("none", "light", "wide", "products", "block")
SEGMENT = "segment"
MAX_DIGITS = 6  # the most digits of a count

PolicyPart = tuple[str, int]  # a way and a number of blocks


def is_policy(text: str) -> bool:
    """Return True if a text is a valid policy."""
    return text in POLICY_NAMES or _is_count(text) or all(_is_part(each) for each in text.split(","))


def parse_policy(policy: Policy, blocks: int) -> list[PolicyPart]:
    """Return a policy as (way, number of blocks) for all blocks; blocks that it does not mention are light."""
    text = str(policy)
    if text == "optimal" or not is_policy(text):
        raise GraphError(
            f"unknown recomputation policy {policy!r}; known are {', '.join(POLICY_NAMES)}, or a number of blocks",
            code="unknown-remat-policy",
        )
    if text in WAYS:
        return [(text, blocks)]
    parts, left = list[PolicyPart](), blocks
    for way, count in [("block", int(text))] if _is_count(text) else map(_parse_part, text.split(",")):
        parts.append((way, min(count, left)))
        left -= parts[-1][1]
    return [each for each in (*parts, ("light", left)) if each[1]]


def format_policy(policy_parts: Sequence[PolicyPart]) -> str:
    """Return a policy as text; light blocks at the end are omitted, and only full blocks give a number."""
    parts = list[PolicyPart]()
    for way, count in policy_parts:
        if count and parts and parts[-1][0] == way != SEGMENT:
            parts[-1] = way, parts[-1][1] + count
        elif count:
            parts.append((way, count))
    if parts and parts[-1][0] == "light":
        parts.pop()
    if not parts or [way for way, _ in parts] == ["none"]:
        return "none" if parts else "light"
    return (
        str(parts[0][1])
        if [way for way, _ in parts] == ["block"]
        else ",".join(f"{way}:{count}" for way, count in parts)
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _is_part(text: str) -> bool:
    way, _, count = text.partition(":")
    return way in (*WAYS, SEGMENT) and _is_count(count) and int(count) > 0


def _parse_part(text: str) -> PolicyPart:
    way, _, count = text.partition(":")
    return way, int(count)
