"""Types that annotations use."""

from typing import Any, Protocol


class SupportsDLPack(Protocol):
    """What every call takes where it needs a tensor: gyre.Tensor, numpy.ndarray, torch.Tensor, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...
