"""Read the text by which a user names a policy, such as `noise`, `bitwise`, `rtol=1e-5,atol=1e-6` or `sqnr>=35`.

Start with `parse`.
"""

from __future__ import annotations

import math
import re

from torchdelta.compare.noise import Noise
from torchdelta.compare.policy import METRIC_RANGES, METRICS, Bitwise, Policy, Threshold, Tolerance
from torchdelta.errors import UsageError

_THRESHOLD = re.compile(r"(?P<metric>\w+)\s*(?P<sign>>=|<=)\s*(?P<bound>[^<>=]*)")
FORMS = (
    "noise, noise*K, bitwise, close (torch.testing's tolerances), rtol=R,atol=A, or METRIC>=X such as sqnr>=35 or "
    "cosine>=0.999"
)


def parse(text: str) -> Policy:
    """Return the policy that a text such as `noise`, `noise*10`, `bitwise`, `rtol=1e-5,atol=1e-6` or `sqnr>=35` names.

    `close` stands for torch.testing's tolerances. A metric may have `>=` or `<=`. Of `rtol` and `atol` one may be left
    out, which is then zero. UsageError if the text is of none of these forms, or has an unknown metric or a bad number,
    such as `noise*K` with K below 1 or a bound that every value of the metric meets.
    """
    words = text.strip()
    fixed: dict[str, Policy] = {"noise": Noise(), "bitwise": Bitwise(), "close": Tolerance()}
    if words in fixed:
        return fixed[words]
    if words.startswith("noise*"):
        accepted = _number(words.removeprefix("noise*"), text)
        if accepted < 1.0:
            raise UsageError(f"malformed policy {text!r}: noise*K accepts K times the noise, and K is at least 1")
        return Noise(accepted)
    if match := _THRESHOLD.fullmatch(words):
        METRICS.get(match["metric"])
        bound, is_least = _number(match["bound"], text), match["sign"] == ">="
        _require_decision(match["metric"], bound, is_least, text)
        return Threshold(match["metric"], is_least, bound)
    if "=" in words and "<" not in words and ">" not in words:
        return _tolerance(text)
    raise UsageError(f"unknown policy {text!r}: it is {FORMS}")


def _require_decision(metric: str, bound: float, is_least: bool, text: str) -> None:
    """Raise UsageError if every value of a metric is within the bound, or none is: such a policy decides nothing.

    `is_least` tells that the bound is a least value. A metric of unknown range may have any bound.
    """
    low, high = METRIC_RANGES.get(metric, (-math.inf, math.inf))
    decides = low < bound <= high if is_least else low <= bound < high
    if not decides:
        raise UsageError(
            f"malformed policy {text!r}: {metric} is from {low:g} to {high:g}, so this bound decides nothing"
        )


def _tolerance(text: str) -> Tolerance:
    """Return the tolerance policy of `rtol=…,atol=…`; one that is not named is zero.

    UsageError if another name is given, a name is given twice, or a number is malformed, not finite or negative.
    """
    # a tolerance that is not named is zero, because a default could hide the difference
    tolerances = {"rtol": 0.0, "atol": 0.0}
    parts = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    if not set(names) <= tolerances.keys() or len(set(names)) < len(names):
        raise UsageError(f"malformed policy {text!r}: it is {FORMS}")
    for name, (_, _, number) in zip(names, parts, strict=True):
        tolerances[name] = _number(number, text)
        if tolerances[name] < 0.0:
            raise UsageError(f"malformed policy {text!r}: a tolerance is zero or more")
    return Tolerance(tolerances["rtol"], tolerances["atol"])


def _number(text: str, policy: str) -> float:
    """Return the finite number that `text` is; UsageError, which quotes the whole `policy`, if it is not one."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"malformed policy {policy!r}: put a number in place of {text.strip()!r}")
    return number
