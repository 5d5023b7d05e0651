"""The words that name a policy."""

from __future__ import annotations

import re

from torchdelta.compare.metrics import METRICS
from torchdelta.compare.noise import Noise
from torchdelta.compare.policy import Bitwise, Policy, Threshold, Tolerance
from torchdelta.errors import UsageError

_THRESHOLD = re.compile(r"(?P<metric>\w+)\s*(?P<sign>>=|<=)\s*(?P<bound>[^<>=]+)$")
FORMS = (
    "noise, bitwise, close (torch.testing's tolerances), rtol=R,atol=A, or METRIC>=X such as sqnr>=35 or cosine>=0.999"
)


def parse(text: str) -> Policy:
    """Return the policy that the words name; UsageError shows the forms there are."""
    words = text.strip()
    fixed: dict[str, Policy] = {"noise": Noise(), "bitwise": Bitwise(), "close": Tolerance()}
    if words in fixed:
        return fixed[words]
    if match := _THRESHOLD.match(words):
        METRICS.get(match["metric"])
        return Threshold(match["metric"], match["sign"] == ">=", _number(match["bound"], text))
    if "=" in words:
        given: dict[str, float] = {}
        for part in words.split(","):
            name, _, number = part.partition("=")
            if name.strip() not in ("rtol", "atol") or name.strip() in given:
                raise UsageError(f"malformed policy {text!r}: it is {FORMS}")
            given[name.strip()] = _number(number, text)
            if not given[name.strip()] >= 0.0:
                raise UsageError(f"malformed policy {text!r}: a tolerance is zero or more")
        # a tolerance that is not named is zero: a default nobody asked for could hide the difference
        return Tolerance(given.get("rtol", 0.0), given.get("atol", 0.0))
    raise UsageError(f"unknown policy {text!r}: it is {FORMS}")


def _number(text: str, policy: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"malformed policy {policy!r}: {text.strip()!r} is not a number") from None
