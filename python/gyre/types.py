"""Types that annotations use."""

from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    import numpy

    NumpyArray = numpy.ndarray[Any, Any]
else:
    NumpyArray = Any  # NumPy is not needed to import gyre

Index = Union[int, slice, EllipsisType]


class SupportsDLPack(Protocol):
    """What every call takes where it needs a tensor: gyre.Tensor, numpy.ndarray, torch.Tensor, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...
