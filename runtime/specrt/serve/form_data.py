"""multipart/form-data: the fields of a form that a request's body holds.

Source: RFC 7578, and RFC 2046 section 5.1 for the parts.
"""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from specrt.errors import RequestError

MOST_FIELDS = 64

_LONGEST_HEADER = 8192

_LONGEST_BOUNDARY = 70


class FormField(NamedTuple):
    """A field of a form."""

    name: str
    data: bytes
    filename: str | None = None
    """As the client calls its file; None of a field that is not a file."""

    @property
    def text(self) -> str:
        """The value of a field that is not a file.

        Raises: RequestError for one that is not UTF-8.
        """
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise RequestError(f"{self.name} is not UTF-8") from None


def parse_form(content_type: str, body: bytes) -> list[FormField]:
    """Return the fields of a body, in order.

    Raises: RequestError for what is not a whole form.
    """
    # A boundary is at the beginning of a line; the first line may be one.
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + _boundary(content_type), MOST_FIELDS + 1)
    if not parts:
        raise RequestError("the body does not hold its boundary; expected multipart/form-data")
    if len(parts) > MOST_FIELDS:
        raise RequestError(f"the form has more than {MOST_FIELDS} fields; send fewer")
    if not parts[-1].startswith(b"--"):
        raise RequestError("the form was cut off: no boundary ends its last field")
    return [_field(part) for part in parts[:-1]]


def _boundary(content_type: str) -> bytes:
    """Return what separates the fields.

    Raises: RequestError for a body of another type.
    """
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise RequestError(
            f"the body is of type {content_type[:80]!r}; expected multipart/form-data with a "
            "boundary, as `curl -F file=@FILE.wav` sends it"
        )
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY or not boundary.isascii():
        raise RequestError(f"the boundary is {boundary[:80]!r}; expected up to 70 characters")
    return boundary.encode()


def _field(part: bytes) -> FormField:
    """Read a part: blanks after the boundary, headers, an empty line, and the data."""
    line, found, rest = part.partition(b"\r\n")
    head, ended, data = rest.partition(b"\r\n\r\n")
    if line.strip(b" \t") or not found or not ended or len(head) > _LONGEST_HEADER:
        raise RequestError("a field of the form has no headers; expected Content-Disposition")
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace"))
    disposition = str(headers.get("content-disposition", ""))
    message = Message()
    message["content-type"] = disposition.replace("\r", "").replace("\n", "") or "none"
    name, filename = message.get_param("name"), message.get_param("filename")
    if not disposition.lower().startswith("form-data") or not isinstance(name, str) or not name:
        raise RequestError(
            f"a field of the form has the disposition {disposition[:80]!r}; expected form-data "
            "with a name"
        )
    if filename is not None and not isinstance(filename, str):
        filename = "file"  # its name in another alphabet, which nothing here reads
    return FormField(name, data, filename)
