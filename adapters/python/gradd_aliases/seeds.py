"""set_seed() of ONNX Runtime Training."""


def set_seed(seed: int) -> None:
    """Sets the seed of dropout and other random operators.

    The daemon draws from what torch's generator gives it, so it is torch's seed that is set, where
    torch is installed. Modules of gradd.train that are made from now on have this seed.

    Args:
        seed: Any integer that torch.manual_seed() takes.
    """
    from gradd.train import module

    module.default_seed = seed % 2**64
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(seed)
