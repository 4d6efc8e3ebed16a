"""What gradd does before a script imports anything: old names, and how torch's threads wait.

Old names are those of ONNX Runtime Training: `torch_ort`, `onnxruntime.training` and the training
names of `optimum.onnxruntime`. An import hook serves them, because packages of these names would
own the same files as the original packages; an installed package of one of these names takes
precedence. GRADD_NO_ALIASES=1 switches that off.

A `.pth` file imports this module at every start of the interpreter: it must stay small and import
only modules that are loaded already.
"""

import os
import sys

_PREFIXES = ("torch_ort", "onnxruntime", "optimum.onnxruntime")
_SPINS = "5000"  # a tenth of a millisecond


class Finder:
    """Finds the module to serve for a name, if it is one of those; sees torch before it loads."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "torch":
            limit_spinning()
            return None
        if not fullname.startswith(_PREFIXES) or not _serves_names():
            return None
        from gradd_aliases import modules

        return modules.find_spec(fullname, path, target)


def _serves_names():
    return os.environ.get("GRADD_NO_ALIASES", "0") in ("", "0")


def limit_spinning():
    """Shortens the time for which torch's idle threads poll, unless the user has set something.

    After an operator of torch on several processors, GNU OpenMP's threads poll for the next one for
    some 6 ms by default. The daemon computes in this time and needs the processors: a forward and
    a backward of 10 ms take twice as long. A tenth of a millisecond still reaches from one operator
    of torch to the next. The library reads the variable once, when it is loaded.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def install():
    """Puts the finder in front of the path finder, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


install()
