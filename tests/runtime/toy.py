"""The module `support.toy` under its former name."""

from support.toy import *  # noqa: F403
