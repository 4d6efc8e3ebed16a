"""What runs in PyTorch instead of the daemon: when that is allowed, said, and counted.

The policies are ONNX Runtime Training's flags. A fallback is never silent: one warning per module
and reason names the module, the operator or construct, and what the call costs in PyTorch; every
fallback is counted and shown by `model.gradd_stats()`. `strict=True`, GRADD_STRICT=1 or
ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
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
# A capture costs as much as many steps. After a few of one form that were hardly used, a call must
# have come so often before it is captured; after many, twice as often for each further capture.
_UNPAID = 4
PAYS = 20
MANY_CAPTURES = 16
_KEPT_CALLS = 256  # that wait for a capture
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
    """Captures of one form of call that failed, each with other attributes or numbers."""

    def __init__(self) -> None:
        self.made = self.wait = 0
        self.reason = ""

    def add(self, reason: str) -> None:
        """Another one: after a few, the next is made after twice as many calls as the last."""
        self.made, self.reason = self.made + 1, reason
        self.wait = min(2 ** (self.made - _TRIES), _LONGEST) if self.made >= _TRIES else 0

    def postponed(self) -> str | None:
        """The last reason, if a call is not to be tried now."""
        if not self.wait:
            return None
        self.wait -= 1
        return self.reason


class Uses:
    """How many calls have used a capture."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class _Captures:
    """Captures of one form of call, each for other sizes, attributes or numbers."""

    def __init__(self) -> None:
        self.made = 0
        self.seconds = 0.0
        self.said = False
        self._last: deque[Uses] = deque(maxlen=_UNPAID)
        self._waiting: OrderedDict[Any, int] = OrderedDict()

    def add(self, uses: Uses, seconds: float) -> None:
        """Another one."""
        self.made += 1
        self.seconds += seconds
        self._last.append(uses)

    def needed(self) -> int:
        """How often a call must have come before it is captured."""
        if self.made >= MANY_CAPTURES:
            return int(min(PAYS * 2 ** (self.made - MANY_CAPTURES), _LONGEST))
        if self.made < _UNPAID or any(uses.calls >= PAYS for uses in self._last):
            return 0
        return PAYS

    def verdict(self) -> str:
        """What is wrong with them, for a message."""
        if self.made >= MANY_CAPTURES:
            return ""
        return f"; none of the last {_UNPAID} captures was used by {PAYS} calls"

    def is_due(self, call: Any) -> bool:
        """Counts a call that has no capture; whether it is to have one."""
        needed = self.needed()
        count = self._waiting.pop(call, 0)
        if count >= needed:
            return True
        self._waiting[call] = count + 1
        if len(self._waiting) > _KEPT_CALLS:
            self._waiting.popitem(last=False)
        return False


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
        self._captured: dict[Any, _Captures] = {}
        self._said: set[tuple[str, str]] = set()
        self._writes: Counter[Any] = Counter()  # by form of the call and reason, see _WRITES

    def known(self, key: Any) -> str | None:
        """Reason for which calls of this form run in PyTorch, if that is decided."""
        return None if self.retry else self._decided.get(key)

    def no_capture(
        self, key: Any, sizes: tuple, first: bool, changes: Callable[[], str]
    ) -> str | None:
        """Reason for which a call that needs a capture runs in PyTorch.

        Args:
            key: Of the call.
            sizes: Of its tensors.
            first: Nothing has been captured under this key.
            changes: What it reads outside and has changed since a capture that would fit; or "".
        """
        if self.retry:
            return None
        known = self._uncaptured.get(key)
        due = known is not None and known.is_due((torch.is_grad_enabled(), *sizes))
        reason = known.reason if known is not None and not due else None
        if reason is None and self._writes:
            form = _form(key)
            reason = next((r for r in _WRITING if self._writes[form, r] >= _WRITES), None)
        if reason is None and (self._failed or self._captured):
            form = _loose_form(key)
            if first and form in self._failed:
                reason = self._failed[form].postponed()
            if reason is None and form in self._captured:
                call = (key, sizes, torch.is_grad_enabled())
                reason = self._too_many(self._captured[form], call, changes)
        return reason

    def _too_many(self, captured: _Captures, call: Any, changes: Callable[[], str]) -> str | None:
        """Captures that do not pay: PyTorch, unless nothing may run there."""
        if captured.is_due(call):
            return None
        torch_may = self.policy & FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
        goes_on = self.strict or not torch_may
        if not captured.said:
            captured.said = True
            logger.warning(
                "%s has been captured %d times (%.1f s) for calls that differ in %s%s. %s. Pass "
                "what changes as a tensor, or keep it outside of the module",
                self.module_name,
                captured.made,
                captured.seconds,
                changes() or "sizes, attributes of the module or numbers among the arguments",
                captured.verdict(),
                "Where nothing may run in PyTorch, it goes on like this"
                if goes_on
                else f"A new one now runs in PyTorch (many_captures) until it has come "
                f"{captured.needed()} times",
            )
        return None if goes_on else "many_captures"

    def captured(self, key: Any, uses: Uses, seconds: float) -> None:
        """A call was captured; `uses` counts the calls that use it."""
        self._captured.setdefault(_loose_form(key), _Captures()).add(uses, seconds)

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
            self._failed.setdefault(_loose_form(key), _Tries()).add(reason)

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

    def warn(self, reason: str, error: Exception, seconds: float, tried: float) -> None:
        """The one warning of a reason.

        Args:
            reason: For the statistics.
            error: What there is to say.
            seconds: The call took in PyTorch.
            tried: Went before it was clear that it has to run there.
        """
        logger.warning(
            "%s runs in PyTorch, not in the daemon (%s): %s. Such calls cost %.1f ms of forward "
            "here and save no memory%s; strict=True or "
            "ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead",
            self.module_name,
            reason,
            str(error).rstrip("."),
            seconds * 1e3,
            f" (this one took {tried:.1f} s before that was known)" if tried > 0.1 else "",
        )


def _form(key: Any) -> Any:
    """A bridge's key without what attributes say."""
    from gradd.export import form_of

    capture_key, version = key
    return form_of(capture_key), version


def _loose_form(key: Any) -> Any:
    """The same without the values of numbers and strings among the arguments.

    And without how often the module was changed by hand: some trainers do that before every step.
    """
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
