"""The error a caller can mend."""

from __future__ import annotations

import click


class BadInputError(click.ClickException):
    """Something the caller gave cannot be used: one line, exit status 2."""

    exit_code = 2
