"""The platform of the wheel: with the daemon inside (GRADD_WHEEL_PLATFORM), it is not pure."""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformHook(BuildHookInterface):
    """Sets the tag; one wheel serves every version of Python 3."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = os.environ.get("GRADD_WHEEL_PLATFORM", "any")
        build_data["pure_python"] = platform == "any"
        build_data["tag"] = f"py3-none-{platform}"
