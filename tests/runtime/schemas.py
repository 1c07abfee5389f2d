"""The module `support.schemas` under its former name."""

from support.schemas import *  # noqa: F403
