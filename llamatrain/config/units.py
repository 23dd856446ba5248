"""Sizes, times and network speeds as people write them: 6GB, 512MiB; 90s, 90m, 2h; 10Gbit."""

import math
import re
from typing import Self

from llamatrain.config.messages import quote
from llamatrain.errors import UsageError

PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
FASTEST = 1e15  # bits a second


class Size(int):
    """A number of bytes. kB, MB, GB and TB count in thousands, KiB, MiB, GiB and TiB in 1024s."""

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """Read a size."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", str(text).strip().lower())
        if not match or (match[3] and not match[2]):
            raise UsageError(
                f"{quote(text)} is not a size; write it as 6GB, 800MB or 6GiB", code="invalid-option"
            )
        bytes_ = float(match[1][:30]) * (1024 if match[3] else 1000) ** PREFIXES[match[2]]
        size = cls(min(bytes_, 2.0**62))
        if size < 1:
            raise UsageError(f"a size must be more than 0 bytes (got {quote(text)})", code="invalid-option")
        return size

    @property
    def text(self) -> str:
        """The size with three digits, in thousands."""
        power = min(4, max(0, (len(str(int(self))) - 1) // 3))
        return (
            f"{self / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
            if self < 10**15
            else f"{int(self):,} bytes"
        )


class Duration(float):
    """Seconds; s, m, h and d behind the number say of what."""

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Read a duration."""
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([smhd]?)", str(text).strip().lower())
        seconds = (
            float(text)
            if isinstance(text, int | float)
            else float(found[1]) * SECONDS[found[2]]
            if found
            else math.nan
        )
        if not 0 < seconds < math.inf:
            raise UsageError(
                f"{quote(text)} is not a duration; write it as 90s, 90m or 2h", code="invalid-option"
            )
        return cls(seconds)


class Bandwidth(float):
    """Bits a second, each way: 100Mbit, 2.5Gbit, 10Gbit/s."""

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Read a network speed."""
        found = re.fullmatch(
            r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)bit(?:/s)?", str(text).strip().lower(), re.ASCII
        )
        bits = float(found[1]) * 1000 ** PREFIXES[found[2]] if found else math.nan
        if not 0 < bits <= FASTEST:
            raise UsageError(
                f"{quote(text)} is not a network speed; write it as 100Mbit, 1Gbit or 10Gbit",
                code="invalid-option",
            )
        return cls(bits)

    @property
    def words(self) -> str:
        """The speed in words."""
        power = min(4, max(0, (len(str(int(self))) - 1) // 3))
        return f"{self / 1000**power:.4g} {('bit', 'kbit', 'Mbit', 'Gbit', 'Tbit')[power]}/s"
