"""The C++ library, which has the kernels inside."""

from cpp.conftest import built_library

__all__ = ["built_library"]
