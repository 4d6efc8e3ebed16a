"""The names of ONNX Runtime Training that old scripts import, served by gradd.

`torch_ort`, `onnxruntime.training` and the training names of `optimum.onnxruntime`. An import hook
serves them, because packages of these names would own the same files as the original packages; an
installed package of one of these names takes precedence. A `.pth` file imports this module at every
start of the interpreter: it must stay small and import only modules that are loaded already.
GRADD_NO_ALIASES=1 switches it off.
"""

import os
import sys

_PREFIXES = ("torch_ort", "onnxruntime", "optimum.onnxruntime")


class Finder:
    """Finds the module to serve for a name, if it is one of those."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if not fullname.startswith(_PREFIXES):
            return None
        if fullname.startswith("optimum"):
            from gradd_aliases import optimum as served
        else:
            from gradd_aliases import modules as served
        return served.find_spec(fullname, path, target)


def install():
    """Puts the finder in front of the path finder, once."""
    if os.environ.get("GRADD_NO_ALIASES", "0") in ("", "0") and Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


install()
