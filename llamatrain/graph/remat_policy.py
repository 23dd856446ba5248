"""What of which block is made again, in a word: `block:3,wide:2` is all of the first three, and of the two that follow what is
wide.

The ways to make a block again, each of which makes more again than the one before: none of it; what is light; of that which is
made by products, what is wider than what goes from block to block; all but attention; all. A segment is so many blocks of which
the first one's input alone is kept: the others' are made again, from there, before their blocks are.
"""

from collections.abc import Sequence
from math import ceil

from llamatrain.errors import GraphError

Policy = str | int
NAMED = (
    "none",
    "light",
    "block",
    "optimal",
)  # or a number: that many blocks, from the first, and light in the others
WAYS = ("none", "light", "wide", "products", "block")
SEGMENT = "segment"
DIGITS = 6  # of a count

Stretch = tuple[str, int]  # so many blocks in one way


def is_policy(text: str) -> bool:
    return text in NAMED or _is_count(text) or all(_is_stretch(each) for each in text.split(","))


def stretches_of(policy: Policy, blocks: int) -> list[Stretch]:
    """Of all blocks; those behind the last that is told of are light."""
    text = str(policy)
    if text == "optimal" or not is_policy(text):
        raise GraphError(
            f"unknown recomputation policy {policy!r}; known are {', '.join(NAMED)}, or a number of blocks"
        )
    if text in WAYS:
        return [(text, blocks)]
    found, left = list[Stretch](), blocks
    for way, count in [("block", int(text))] if _is_count(text) else map(_stretch, text.split(",")):
        found.append((way, min(count, left)))
        left -= found[-1][1]
    return [each for each in (*found, ("light", left)) if each[1]]


def told(stretches: Sequence[Stretch]) -> str:
    """The word for them: what is light at their end goes without saying, and blocks alone are a number."""
    found = list[Stretch]()
    for way, count in stretches:
        if count and found and found[-1][0] == way != SEGMENT:
            found[-1] = way, found[-1][1] + count
        elif count:
            found.append((way, count))
    if found and found[-1][0] == "light":
        found.pop()
    if not found or [way for way, _ in found] == ["none"]:
        return "none" if found else "light"
    return (
        str(found[0][1])
        if [way for way, _ in found] == ["block"]
        else ",".join(f"{way}:{count}" for way, count in found)
    )


def scaled(policy: Policy, blocks: int, to: int) -> Policy:
    """For `to` blocks what it is for so many: of each way the same share."""
    if str(policy) in NAMED:
        return policy
    found, before, at = list[Stretch](), 0, 0
    for way, count in stretches_of(policy, blocks):
        at += count
        found.append((way, ceil(to * at / blocks) - before))
        before += found[-1][1]
    return told(found)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS


def _is_stretch(text: str) -> bool:
    way, _, count = text.partition(":")
    return way in (*WAYS, SEGMENT) and _is_count(count) and int(count) > 0


def _stretch(text: str) -> Stretch:
    way, _, count = text.partition(":")
    return way, int(count)
