"""Fallbacks to PyTorch: when they are allowed, and how they are reported and counted.

The policies are ONNX Runtime Training's flags. A fallback is never silent: one warning per module
and reason names the module, the operator or construct, and the cost of the call in PyTorch; every
fallback is counted and shown by `model.gradd_stats()`. `strict=True`, GRADD_STRICT=1 or
ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from gradd import about, errors, options, reasons
from gradd.reasons import DEFAULT_POLICY, FallbackPolicy

logger = logging.getLogger("gradd")


class SelfCheckError(errors.InternalError):
    """The daemon does not agree with PyTorch; the message names the value and the step."""

    reason = "self_check"


def policy_from_environment() -> FallbackPolicy:
    """ORTMODULE_FALLBACK_POLICY, one name or several joined by |.

    Raises:
        ValueError: There is no policy of that name.
    """
    text = options.get("ORTMODULE_FALLBACK_POLICY")
    if not text:
        return DEFAULT_POLICY
    names = [name.strip() for name in str(text).split("|")]
    return policy_of(names, f"ORTMODULE_FALLBACK_POLICY={text!r}")


def policy_of(names: Iterable[str], what: str) -> FallbackPolicy:
    """The policies of these names together.

    Raises:
        ValueError: There is no policy of one of the names; the message begins with `what`.
    """
    policy = FallbackPolicy(0)
    for name in names:
        try:
            policy |= FallbackPolicy[name]
        except KeyError:
            known = ", ".join(FallbackPolicy.__members__)
            raise ValueError(f"{what}: expected {known}") from None
    return policy


class Fallback:
    """Decides and counts, for one compiled function."""

    def __init__(self, module_name: str, strict: bool) -> None:
        self.module_name = module_name
        self._always_strict = strict or bool(options.get("GRADD_STRICT"))
        self.take(policy_from_environment())
        self.retry = bool(options.get("ORTMODULE_FALLBACK_RETRY"))
        self.counts: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()

    def take(self, policy: FallbackPolicy) -> None:
        """Decides by this policy from now on."""
        disabled = bool(policy & FallbackPolicy.FALLBACK_DISABLE)
        self.strict = self._always_strict or disabled
        self.policy = policy

    def decide(self, error: Exception) -> str:
        """The reason under which `error` falls back; raises the error where it may not."""
        flag, reason = classify(error)
        if flag != FallbackPolicy.FALLBACK_BAD_INITIALIZATION:
            flag |= (
                FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD
            )  # which allows whatever a call meets
        if self.strict or not self.policy & flag:
            raise error
        return reason

    def count(self, reason: str, detail: str = "") -> bool:
        """Counts one call in PyTorch; True if this reason has not been reported yet.

        Args:
            reason: For the statistics.
            detail: Distinguishes reports under one reason.
        """
        self.counts[reason] += 1
        if (reason, detail) in self._said:
            return False
        self._said.add((reason, detail))
        about.note_fallback()
        return True

    def warn(
        self, reason: str, error: Exception, seconds: float, tried: float, in_part: bool = False
    ) -> None:
        """The one warning of a reason.

        Args:
            reason: For the statistics.
            error: The error to report.
            seconds: The call took in PyTorch; 0 = unknown.
            tried: Went before it was clear that it has to run there.
            in_part: Other parts run in the daemon.
        """
        logger.warning(
            "%s runs in PyTorch, not in the daemon (%s): %s. Such calls save no memory%s%s; "
            "strict=True or ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead "
            "(docs/messages.md)",
            f"a part of {self.module_name}" if in_part else self.module_name,
            reason,
            getattr(error, "message", str(error)).rstrip("."),  # without the reason
            f"; a forward takes {seconds * 1e3:.1f} ms" if seconds else "",
            f" (this call took {tried:.1f} s more, to find that out)" if tried > 0.1 else "",
        )


def classify(error: Exception) -> tuple[FallbackPolicy, str]:
    """The policy flag that covers an error, and the short reason for the statistics."""
    name = getattr(error, "reason", "")  # a device's, a capture's, a self-check's
    if not name and isinstance(error, errors.SessionError):
        name = "session"
    elif not name and isinstance(error, errors.GraddError):
        name = error.code.lower()
    known = reasons.BY_NAME.get(name)
    if known is None or known.flag is None:
        return FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD, type(error).__name__
    return known.flag, name
