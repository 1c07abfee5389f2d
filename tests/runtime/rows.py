"""The module `support.rows` under its former name."""

from support.rows import *  # noqa: F403
