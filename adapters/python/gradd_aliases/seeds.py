"""set_seed() of ONNX Runtime Training."""

import torch


def set_seed(seed: int) -> None:
    """Sets the seed of dropout and other random operators.

    The daemon draws from what torch's generator gives it, so it is torch's seed that is set.

    Args:
        seed: Any integer that torch.manual_seed() takes.
    """
    torch.manual_seed(seed)
