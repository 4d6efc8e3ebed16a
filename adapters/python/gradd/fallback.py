"""What runs in PyTorch instead of the daemon: when that is allowed, said, and counted.

The policies are ONNX Runtime Training's flags. A fallback is never silent: one warning per module
and reason names the module, the operator or construct, and what the call costs in PyTorch; every
fallback is counted and shown by `model.gradd_stats()`. `strict=True`, GRADD_STRICT=1 or
ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from typing import Any

import torch

from gradd import errors, options

logger = logging.getLogger("gradd")


class FallbackPolicy(enum.IntFlag):
    """Kinds of failure after which PyTorch takes over."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128


DEFAULT_POLICY = (
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)
_DATA_REASONS = {"unsupported_input_type", "unsupported_output_type", "input_mutation"}
# A forward() that writes attributes has another key at every call. The first calls may only fill
# something in, and the next one is captured; after so many, all calls of that form run in PyTorch.
# The same holds for what it writes outside of the module, which is in no key.
_WRITES = 3
# A capture that fails costs seconds, and an attribute that changes in every step asks for one.
_TRIES = 8
_LONGEST = 1024  # calls
# One may have failed for its sizes: others are tried at once, and after 16 and 256 calls.
_OTHER_SIZES, _LATER = 3, 16
MANY_CAPTURES = 16  # of one form with other attributes or numbers, until the next has to wait
_WRITING = ("attribute_written", "outside_written")


class DeviceError(errors.UnsupportedError):
    """Parameters or inputs are where the daemon cannot reach them."""


class SelfCheckError(errors.GraddError):
    """The daemon does not agree with PyTorch; the message names the value and the step."""

    code = "INTERNAL"


def policy_from_environment() -> FallbackPolicy:
    """ORTMODULE_FALLBACK_POLICY, one name or several joined by |.

    Raises:
        ValueError: There is no policy of that name.
    """
    text = options.get("ORTMODULE_FALLBACK_POLICY")
    if not text:
        return DEFAULT_POLICY
    policy = FallbackPolicy(0)
    for name in str(text).split("|"):
        try:
            policy |= FallbackPolicy[name.strip()]
        except KeyError:
            known = ", ".join(FallbackPolicy.__members__)
            raise ValueError(f"ORTMODULE_FALLBACK_POLICY={text!r}: expected {known}") from None
    return policy


class _Tries:
    """Captures of one form of call, each with other attributes of the module or other numbers."""

    def __init__(self, free: int) -> None:
        self.made = self.wait = 0
        self.free = free
        self.reason = ""

    def add(self, reason: str) -> None:
        """Another one: after `free`, the next is made after twice as many calls as the last."""
        self.made, self.reason = self.made + 1, reason
        self.wait = min(2 ** (self.made - self.free), _LONGEST) if self.made >= self.free else 0

    def postponed(self) -> str | None:
        """The last reason, if a call is not to be tried now."""
        if not self.wait:
            return None
        self.wait -= 1
        return self.reason


class _Uncaptured:
    """A form of call that could not be captured: what has been captured already may run."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._sizes: set[Any] = set()
        self._calls = 0

    def add(self, sizes: tuple) -> None:
        """It failed with this mode of gradients and these sizes."""
        self._sizes.add(sizes)

    def is_due(self, sizes: tuple) -> bool:
        """Others than those may do; but captures cost seconds, so few are tried."""
        self._calls += 1
        failed = len(self._sizes)
        return (
            sizes not in self._sizes
            and failed <= _OTHER_SIZES
            and self._calls >= _LATER ** (failed - 1)
        )


class Fallback:
    """Decides, remembers and counts, for one bridge."""

    def __init__(self, module_name: str, strict: bool) -> None:
        self.module_name = module_name
        policy = policy_from_environment()
        disabled = bool(policy & FallbackPolicy.FALLBACK_DISABLE)
        self.strict = strict or disabled or bool(options.get("GRADD_STRICT"))
        self.policy = policy
        self.retry = bool(options.get("ORTMODULE_FALLBACK_RETRY"))
        self.counts: Counter[str] = Counter()
        self._decided: dict[Any, str] = {}
        self._uncaptured: dict[Any, _Uncaptured] = {}
        self._failed: dict[Any, _Tries] = {}
        self._captured: dict[Any, _Tries] = {}
        self._said: set[tuple[str, str]] = set()
        self._writes: Counter[Any] = Counter()  # by form of the call and reason, see _WRITES

    def known(self, key: Any) -> str | None:
        """Reason for which calls of this form run in PyTorch, if that is decided."""
        return None if self.retry else self._decided.get(key)

    def no_capture(self, key: Any, sizes: tuple, first: bool) -> str | None:
        """Reason for which a call that needs a capture runs in PyTorch.

        Args:
            key: Of the call.
            sizes: Of its tensors.
            first: Nothing has been captured under this key.
        """
        if self.retry:
            return None
        known = self._uncaptured.get(key)
        due = known is not None and known.is_due((torch.is_grad_enabled(), *sizes))
        reason = known.reason if known is not None and not due else None
        if reason is None and self._writes:
            form = _form(key)
            reason = next((r for r in _WRITING if self._writes[form, r] >= _WRITES), None)
        return self._postponed(key) if reason is None and first else reason

    def _postponed(self, key: Any) -> str | None:
        if not (self._failed or self._captured):
            return None
        form = _loose_form(key)
        known = (table.get(form) for table in (self._failed, self._captured))
        return next((reason for t in known if t and (reason := t.postponed())), None)

    def captured(self, key: Any) -> None:
        """A call was captured whose attributes and numbers were new: that must not go on for ever.

        Where nothing may run in PyTorch, it does.
        """
        if not self.strict and self.policy & FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL:
            tries = self._captured.setdefault(_loose_form(key), _Tries(MANY_CAPTURES))
            tries.add("many_captures")

    def decide(self, error: Exception) -> str:
        """The reason under which `error` falls back; raises the error where it may not."""
        flag, reason = classify(error)
        if self.strict or not self.policy & flag:
            raise error
        return reason

    def remember(self, key: Any, reason: str, refused: tuple | None) -> None:
        """Calls of this form run in PyTorch from now on.

        Where a capture was `refused` for the sizes of the call, those that fit go on to be used.

        Only a call that PyTorch has carried out says so: one that fails there as well was wrong
        itself, and the next of its form may be right.
        """
        if reason in _WRITING:
            self._writes[_form(key), reason] += 1
        if reason not in ("outside_written", "memory_layout"):  # the bridge knows these better
            if refused is None:
                self._decided[key] = reason
            else:
                tried = (torch.is_grad_enabled(), *refused)
                self._uncaptured.setdefault(key, _Uncaptured(reason)).add(tried)
            self._failed.setdefault(_loose_form(key), _Tries(_TRIES)).add(reason)

    def count(self, reason: str, detail: str = "") -> bool:
        """Counts one call in PyTorch; True if this reason has not been reported yet.

        Args:
            reason: For the statistics.
            detail: What distinguishes reports under one reason.
        """
        self.counts[reason] += 1
        if (reason, detail) in self._said:
            return False
        self._said.add((reason, detail))
        return True

    def warn(self, reason: str, error: Exception, milliseconds: float) -> None:
        """The one warning of a reason."""
        logger.warning(
            "%s runs in PyTorch, not in the daemon (%s): %s. Such calls cost %.1f ms of forward "
            "here and save no memory; strict=True or ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE "
            "raises instead",
            self.module_name,
            reason,
            str(error).rstrip("."),
            milliseconds,
        )


def _form(key: Any) -> Any:
    """A bridge's key without what attributes say."""
    from gradd.export import form_of

    capture_key, version = key
    return form_of(capture_key), version


def _loose_form(key: Any) -> Any:
    """The same without the values of numbers and strings among the arguments."""
    from gradd.export import form_of

    (structure, leaves, same), *rest = form_of(key[0])
    kinds = tuple(leaf[0] if isinstance(leaf[0], type) else leaf for leaf in leaves)
    return (structure, kinds, same, *rest)


def classify(error: Exception) -> tuple[FallbackPolicy, str]:
    """The policy flag that covers an error, and the short reason for the statistics."""
    from gradd.export import CaptureError

    if isinstance(error, CaptureError):
        data = error.reason in _DATA_REASONS
        flag = (
            FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
            if data
            else FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
        )
        return flag, error.reason
    if isinstance(error, DeviceError):
        return FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE, "device"
    if isinstance(error, SelfCheckError):
        return FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, "self_check"
    if isinstance(error, (errors.UnsupportedError, errors.ModelError, errors.GraphError)):
        return FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL, error.code.lower()
    if isinstance(error, (errors.SessionError, errors.VersionError)):
        return FallbackPolicy.FALLBACK_BAD_INITIALIZATION, error.code.lower()
    return FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD, type(error).__name__
