"""Forms: what clients send is read, and damaged ones are refused."""

from __future__ import annotations

from contextlib import suppress

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specrt.errors import RequestError
from specrt.serve.form_data import FormField, parse_form

KIND = "multipart/form-data; boundary=xyz"


def part(data: bytes, head: bytes = b'Content-Disposition: form-data; name="a"') -> bytes:
    return b"--xyz\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.binary()), max_size=4), st.binary())
@example([], b"\r\n--\r\n")
def test_what_httpx_sends_is_read(values: list[tuple[str, bytes]], file: bytes) -> None:
    names = [name for name, _ in values]
    fields = {f"n{at}": value for at, (_, value) in enumerate(values)}
    sent = httpx.Request("POST", "http://a", data=fields, files={"file": ("x.wav", file)})
    found = parse_form(sent.headers["content-type"], sent.read())
    assert found[-1] == FormField("file", file, "x.wav")
    assert [one.data for one in found[:-1]] == list(fields.values())
    assert len(found) == len(names) + 1


def test_other_spellings_are_read() -> None:
    body = (
        b"before\r\n" + part(b"1").replace(b"--xyz\r\n", b"--xyz \t\r\n")
        + part(b"2", b"X: y\r\ncontent-disposition: form-data; name=b") + b"--xyz--\r\nbehind"
    )  # fmt: skip
    assert parse_form(KIND, body) == [FormField("a", b"1"), FormField("b", b"2")]
    named = part(b"", b"Content-Disposition: form-data; name=\"f\"; filename*=UTF-8''%e2%82%ac")
    (found,) = parse_form('Multipart/Form-Data; boundary="xyz"', named + b"--xyz--")
    assert found == FormField("f", b"", "file")
    with pytest.raises(RequestError, match="a is not UTF-8"):
        _ = FormField("a", b"\xff").text


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("application/json", b"{}", "the body is of type 'application/json'; expected multipart"),
        ("multipart/form-data; boundary=" + "x" * 71, b"", "the boundary is 'xx"),
        (KIND, b"", "the body does not hold its boundary"),
        (KIND, part(b"1") * 65 + b"--xyz--", "the form has more than 64 fields"),
    ],
)
def test_damaged_forms_are_refused(kind: str, body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_form(kind, body)


@given(st.data())
@settings(max_examples=100)
def test_a_damaged_form_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(
        part(b"1\r\n2") + part(b"", b"A: b\r\nContent-Disposition: form-data") + b"--xyz--"
    )
    for _ in range(data.draw(st.integers(0, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    kind = data.draw(st.sampled_from([KIND, KIND + "; a", "multipart/form-data; boundary*=xyz"]))
    with suppress(RequestError):
        parse_form(data.draw(st.text()) if data.draw(st.booleans()) else kind, bytes(body))
