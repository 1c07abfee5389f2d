"""The sandbox of chat templates: jinja2's, which also follows whose text it handles and ends.

Jinja keeps a template from reaching out. Here a render has a time, which loops, calls, filters and
operators look at, and what they make has a size. No single operation is interrupted.

Source: https://jinja.palletsprojects.com/en/stable/sandbox/ (which leaves resources to the host)
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specrt.errors import RequestError
from specrt.text.traced_text import followed, joined, shown

MOST_SECONDS = 10.0
"""Processor time of a render."""

_BITS = 64
"""Of an integer: Python's arithmetic on larger ones takes any time in one operation."""

_PASSED_ON = {
    "abs", "attr", "count", "d", "default", "first", "items", "last", "length", "map", "reject",
    "rejectattr", "select", "selectattr",
}  # fmt: skip
"""Filters that return numbers or what is in their value, which knows where it comes from."""


class TemplateLimitError(RequestError):
    """A chat template is too long, takes too much time or makes too much."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"the chat template {what}; expected the messages and a loop or two over them: "
            "correct it in the checkpoint and build the bundle again"
        )


class Limits(threading.local):
    """What the render of a thread may take: processor time, and the length of what it makes."""

    end = 0.0
    most = 0

    def begin(self, most: int) -> None:
        """Begin a render."""
        self.end, self.most = time.thread_time() + MOST_SECONDS, most

    def check_time(self) -> None:
        """Raise TemplateLimitError when the time is over."""
        if time.thread_time() > self.end:
            raise TemplateLimitError(f"takes more than {MOST_SECONDS:g} seconds")

    def check_length(self, length: int) -> None:
        """Raise TemplateLimitError for what is too long."""
        if length > self.most:
            raise TemplateLimitError(f"makes more than {self.most} characters or elements")

    def checked(self, value: Any) -> Any:
        """Return the result of an operation."""
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise TemplateLimitError(f"computes an integer of more than {_BITS} bits")
        if isinstance(value, (str, list, tuple)):
            self.check_length(len(value))
        return value


class _Generator(CodeGenerator):
    """Writes loops and `~` as calls of the sandbox."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.iter = _called("timed", node.iter)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.visit(_called("concatenated", nodes.List(node.nodes)), frame)


def _called(name: str, value: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), [value], [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment with the names that transformers gives templates.

    Threads: each renders with limits of its own.
    """

    optimized = False  # nothing is worked out before there are limits
    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.limits = Limits()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=pass_context(lambda _, value: _told(value)),
        )
        self.filters["tojson"] = functions["tojson"]
        self.globals.update(functions)
        self.filters |= {
            name: self._filter(name, function)
            for name, function in self.filters.items()
            if name not in _PASSED_ON
        }

    def prepare(self, source: str) -> tuple[Any, tuple[str, ...]]:
        """Return a template, and the texts that are written in it.

        Raises: jinja2.TemplateError, RequestError, RecursionError.
        """
        tree = self.parse(source)
        if tree.find(nodes.ScopedEvalContextModifier):
            raise RequestError(
                "the chat template has `autoescape`, which changes what messages say; remove it "
                "in the checkpoint and build the bundle again"
            )
        written = [node.data for node in tree.find_all(nodes.TemplateData)]
        written += [c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)]
        return self.from_string(tree), tuple(written)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse what makes bytes of a text, of which nothing says whose they are."""
        return attr != "encode" and super().is_safe_attribute(obj, attr, value)

    def timed(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield what a loop is over, as long as there is time."""
        for value in values:
            self.limits.check_time()
            yield value

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro or a block wrote."""
        return str(self.limits.checked(joined(pieces)))

    def concatenated(self, values: Sequence[Any]) -> str:
        """Join what `~` stands between."""
        return self.concat([str(_told(value)) for value in values])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic, which repeats and formats text too."""
        self.limits.check_time()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and abs(left) > 1:
            self.limits.checked(1 << max(0, min(right, _BITS + 1) - 1))
        if operator == "*" and not numbers:
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                self.limits.check_length(len(repeated) * times)
        operation = functools.partial(super().call_binop, context, operator)
        result = followed(operator, operation, (left, right), operation(left, right))
        return self.limits.checked(result)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method."""
        __self.limits.check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps `str.format`
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)

        def of_text(text: str, *args: Any, **named: Any) -> Any:
            return __self.getattr(text, method.__name__)(*args, **named)

        named = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
        return __self._followed(method.__name__, of_text, (owner, *args), named)

    def _filter(self, name: str, function: Any) -> Any:
        """Return a filter whose text is followed."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def filtered(*args: Any, **named: Any) -> Any:
            self.limits.check_time()
            applied = functools.partial(function, *args[:passed])
            return self._followed(name, applied, args[passed:], named)

        return filtered

    def _followed(
        self, name: str, function: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        """Call a function of text, and keep where its result comes from."""
        args = [[*one] if isinstance(one, Iterator) else one for one in args]
        if named and name == "replace":
            name = ""  # its values come in any order

        def operation(*values: Any) -> Any:
            more = dict(zip(named, values[len(args) :], strict=True))
            return function(*values[: len(args)], **more)

        values = [*args, *named.values()]
        return self.limits.checked(followed(name, operation, values, operation(*values)))


def _told(value: Any) -> Any:
    """Return a value as it is written."""
    return shown(value) if isinstance(value, (dict, list, tuple)) else value


class _Generation(Extension):
    """The `{% generation %}` block of newer templates, which marks and changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
