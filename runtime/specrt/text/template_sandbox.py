"""The sandbox of chat templates: jinja2's, where each operation is paid for before it is done.

A template is a program of a stranger. Jinja's sandbox keeps it from reaching out; this one also
bounds what it takes. A render has a budget of steps. Operations that look at whole values cost
what those values weigh, and operations that multiply text cost their result, so that time and
memory are bounded by the budget. Loops and macros cost their length in nodes, each time. What has
no price is refused: filters, methods and statements that no chat template needs.

Source: https://jinja.palletsprojects.com/en/stable/sandbox/ (which leaves resources to the host)
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Sequence,
    ValuesView,
)
from string import Formatter
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from specrt.errors import RequestError
from specrt.text.traced_text import followed, joined, shown

UNIT = 16
"""Characters of text that weigh as much as one element of a list."""

DEEPEST = 64
"""Levels of lists within lists; Python's own functions end the process when there are many."""

LARGEST = 2**63
"""Integers beyond cost what their digits do, and can be made to collide in a table."""

_CALL = 4
"""Steps of a call: what it takes beside what it does."""

_SIMPLE = (str, int, float, list, tuple)
_CONTAINERS = (list, tuple, range, set, KeysView, ValuesView, ItemsView)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAZY = _words("map reject rejectattr select selectattr")
"""Filters that look at elements only as they are asked for."""

_FREE = _LAZY | _words("abs attr count d default first items last length")
"""Filters that look at no more than one element, or at each as it is asked for."""

_PLAIN = _words(
    "capitalize e escape float forceescape format int list lower replace reverse "
    "safe string title truncate upper urlencode wordcount"
)
"""Filters that read their value once, but for what `_pay_filter` says of some."""

_ORDERING = _words("dictsort groupby max min sort sum unique")
_SEQUENCES = _words("batch join list slice") | _ORDERING
"""Filters that take a text apart into characters."""

_TIMES = _words("batch center indent join round slice tojson trim") | _ORDERING
"""Filters whose work, or whose result, may be their value times their arguments."""

_METHODS = {
    str: _words(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
        "isidentifier islower isnumeric isprintable isspace istitle isupper lower partition "
        "removeprefix removesuffix startswith swapcase title upper"
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
    tuple: _words("count index"),
    LoopContext: _words("changed cycle"),
    Cycler: _words("next reset"),
}
_TIMES_METHODS = _words(
    "center expandtabs ljust lstrip rfind rindex rjust rpartition rstrip strip zfill"
)
_DEEP_TESTS = _words(
    "== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in lower upper filter test"
)
_NUMBER_TESTS = _words("divisibleby even odd")
"""Tests by `%`, which formats where it is given text."""

_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Block: "block", nodes.Extends: "extends", nodes.FromImport: "from",
    nodes.Import: "import", nodes.Include: "include", nodes.ScopedEvalContextModifier: "autoescape",
}  # fmt: skip
"""Statements that need other files, or copy every variable, or are worked out beforehand."""

_COUNTED, _WEIGHED, _SLICED, _KEY, _PAID = " counted", " settled", " sliced", " keyed", " pay"
_JOINED = " concatenated"
"""Filters that are put into a template here. They are methods of the sandbox and in no table, so
that no template can name them."""


class Budget(threading.local):
    """The steps that a render has left, for each thread that renders."""

    left = 0
    given = 0

    def grant(self, steps: int) -> None:
        """Begin anew with some steps."""
        self.left = self.given = steps

    def spend(self, steps: int) -> None:
        """Take steps.

        Raises: RequestError when there are not as many.
        """
        self.left -= steps
        if self.left < 0:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            f"the chat template takes more than {self.given} steps; expected a loop or two over "
            "the messages: correct it in the checkpoint and build the bundle again"
        )


def weight(value: Any, spend: Callable[[int], object] = int) -> int:
    """Return what a value weighs: its elements within elements, and its text.

    `spend` is told as it goes: a list may hold another many times, and weigh more than memory.
    Raises: RequestError for one that is nested too deeply.
    """
    total, level, depth = 1, [value], 0
    spend(1)
    while level:
        inner: list[Any] = []
        for one in level:
            parts = () if isinstance(one, str) else _parts(one)
            more = len(one) // UNIT if isinstance(one, str) else len(parts)
            spend(more)
            total += more
            inner += parts
        level, depth = inner, depth + 1
        if depth > DEEPEST:
            raise _too_deep("lists")
    return total


def _too_deep(what: str) -> RequestError:
    return RequestError(
        f"the chat template nests {what} more than {DEEPEST} deep; expected messages and what they "
        "hold: correct it in the checkpoint and build the bundle again"
    )


def _parts(value: Any) -> Sequence[Any]:
    """Return the elements of a value that holds others."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, ItemsView):
        return [part for pair in value for part in pair]
    return [*value] if isinstance(value, _CONTAINERS) else ()


def _factor(values: Iterable[Any]) -> int:
    """Return how often arguments, weighed before, may repeat a value.

    Integers count by size, text by length, and what holds others as the text of all.
    """
    total = 1
    for value in values:
        if isinstance(value, int):
            total += abs(value)
        elif isinstance(value, str):
            total += len(value)
        else:
            parts = _parts(value)
            total += _factor(parts) + 4 * len(parts) if parts else 0
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates spend a budget, with the names that transformers gives them.

    Threads: each renders with a budget of its own.
    """

    optimized = False  # nothing is worked out before there is a budget
    intercepted_binops = _words("+ - * / // % **")

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.budget = Budget()
        self._nodes = 1
        self.code_generator_class = _Generator
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=pass_context(lambda _, value: self._shown(value)),
        )
        tojson = functions.pop("tojson")
        names = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace}
        names |= {"cycler": Cycler, "joiner": Joiner, **functions}
        self.globals.clear()
        self.globals.update(names)
        self._functions = {id(function) for function in names.values()}
        self.filters = {
            name: self._filter(name, tojson if name == "tojson" else function)
            for name, function in self.filters.items()
            if name in _FREE | _PLAIN | _TIMES
        }
        self.tests = {name: self._test(name, test) for name, test in self.tests.items()}

    def prepare(self, source: str) -> tuple[Any, tuple[str, ...]]:
        """Return a template that pays for what it does, and the texts that are written in it.

        Raises: jinja2.TemplateError, RequestError, RecursionError.
        """
        priced, tree = _Priced(), self.parse(source)
        written = [node.data for node in tree.find_all(nodes.TemplateData)]
        written += [c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)]
        tree = priced.visit(tree)
        tree.set_environment(self)
        self._nodes = priced.nodes
        return self.from_string(tree), tuple(written)

    # What generated code calls

    def pay(self, steps: int) -> None:
        """Pay for what a macro does each time."""
        self.budget.spend(steps)

    def settled(self, value: Any) -> Any:
        """Pay for looking at a value, and at what it will generate."""
        return self._weighed([*value] if isinstance(value, Iterator) else value)

    def sliced(self, value: Any) -> Any:
        """Pay for a part of a value, which was copied."""
        self.budget.spend(self._size(value))
        return value

    def keyed(self, key: Any) -> Any:
        """Pay for hashing the key of a mapping."""
        return _check_key(self._weighed(key))

    def counted(self, values: Any, each: int) -> Any:
        """Return something to iterate over that costs steps for each element."""
        return _Counted(values, each, self.budget.spend)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro or a block wrote."""
        written = [*pieces]
        self.budget.spend(len(written) + sum(map(len, written)) // UNIT)
        return joined(written)

    def concatenated(self, values: Sequence[Any]) -> str:
        """Join what `~` stands between."""
        return joined([str(self._shown(value)) for value in values])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic, which multiplies and formats text too."""
        spend = self.budget.spend
        if type(left) is int and type(right) is int:
            spend(1)
            if operator == "**" and abs(left) > 1 and abs(right) > LARGEST.bit_length():
                _check_integer(LARGEST)
        elif operator == "%" and isinstance(left, str):
            self._pay_format(left, "%", right)
        elif operator == "*":
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            copies = times if isinstance(repeated, (str, list, tuple)) else 1
            spend(self._size(repeated) * copies if isinstance(copies, int) and copies > 0 else 1)
        elif isinstance(left, _SIMPLE) and isinstance(right, _SIMPLE):
            spend(self._size(left) + self._size(right))
        else:  # differences of sets hash what is in them
            for side in self._weighed((left, right)):
                _check_keys([()] if isinstance(side, ItemsView) else _parts(side))
        operation = functools.partial(super().call_binop, context, operator)
        result = followed(operator, operation, (left, right), operation(left, right))
        return _check_integer(result)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key, which is hashed."""
        if not isinstance(argument, (str, int)):
            weight(argument, self.budget.spend)
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method that has a price."""
        __self.budget.spend(_CALL + len(args) + len(kwargs))
        if isinstance(__obj, LoopContext):  # of a recursive loop
            args = tuple([__self.counted(one, __self._nodes) for one in args])
            if "iterable" in kwargs:
                kwargs["iterable"] = __self.counted(kwargs["iterable"], __self._nodes)
        elif not isinstance(__obj, (Macro, Joiner, Undefined)):
            args = tuple([[*one] if isinstance(one, Iterator) else one for one in args])
            given = {k: v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars")}
            __self._pay_call(__obj, [*args, *given.values()])
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            if isinstance(owner, str):
                return __self._call_text(owner, __obj.__name__, args, given)
        return super().call(__context, __obj, *args, **kwargs)

    def _call_text(self, text: str, name: str, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Call a method of a text, and keep where the result comes from."""

        def operation(text: str, *values: Any) -> Any:
            more = dict(zip(named, values[len(args) :], strict=True))
            return self.getattr(text, name)(*values[: len(args)], **more)

        values = [text, *args, *named.values()]
        return followed(name, operation, values, operation(*values))

    # Prices

    def _pay_call(self, function: Any, values: Sequence[Any]) -> None:
        """Pay for a call, or refuse it.

        Raises: RequestError.
        """
        if id(function) in self._functions:
            self._weighed(values)
            if function in (dict, _Namespace) and values and not isinstance(values[0], dict):
                _check_keys(map(_first, _parts(values[0])))
            return
        method = getattr(function, "__wrapped__", function)  # jinja wraps `str.format`
        name = getattr(method, "__name__", "")
        if isinstance(method, (BuiltinMethodType, MethodType)):
            owner = method.__self__
            if isinstance(owner, str) and self._pay_text(owner, name, values):
                return
            for kind, names in _METHODS.items():
                if isinstance(owner, kind) and name in names:
                    looks = isinstance(owner, (str, list, tuple))
                    self._weighed([owner, *values] if looks else values)
                    return
        raise RequestError(
            f"the chat template calls {_named(function)}, which has no bound here; expected a "
            "macro, or a usual method of text, a list or a mapping: correct it in the checkpoint "
            "and build the bundle again"
        )

    def _pay_text(self, text: str, name: str, values: Sequence[Any]) -> bool:
        """Pay for a method of text that may write more than it reads; False for the others."""
        if name in ("format", "format_map"):
            self._pay_format(text, "{", values)
        elif name == "join":
            self._pay_parts(values)
            self._pay_times(values, [text])
        elif name == "replace":
            self._pay_replace(text, *values[:2])
        elif name in ("split", "rsplit", "splitlines"):
            pieces = values[0] if values else None
            by_text = isinstance(pieces, str) and pieces != ""
            self.budget.spend(self._count(text, str(pieces)) if by_text else len(text))
            self._pay_times(text, values if name == "rsplit" else ())
        elif name in _TIMES_METHODS:
            self._pay_times(text, values)
        else:
            return False
        return True

    def _pay_times(self, value: Any, values: Sequence[Any]) -> None:
        weighs = self._weigh(value)
        self._weighed(values)
        self.budget.spend(weighs * _factor(values) - weighs)

    def _pay_parts(self, values: Iterable[Any]) -> None:
        self.budget.spend(sum([len(one) for one in values if isinstance(one, str)]))

    def _pay_replace(self, value: Any, old: Any = "", new: Any = "") -> None:
        text, old, new = str(self._weighed(value)), str(self._weighed(old)), str(self._weighed(new))
        self.budget.spend(self._count(text, old) * (1 + len(new) // UNIT))

    def _count(self, text: str, part: str) -> int:
        """Count a text in another; Python looks at some again for each place it tries."""
        self.budget.spend(min(len(text) * len(part), 1 << 22) >> 10)
        return text.count(part)

    def _pay_format(self, form: str, mark: str, values: Any) -> None:
        """Pay for formatting: each place may show all values, in a field of a stated width.

        Raises: RequestError for widths that are values themselves.
        """
        self._weighed(form)
        if mark == "%":
            specs, nested = [form], re.search(r"%[^a-zA-Z%]*\*", form) is not None
        else:
            specs = [spec or "" for _, _, spec, _ in Formatter().parse(form)]
            nested = any("{" in spec for spec in specs)
        if nested:
            raise RequestError(
                "the chat template formats text with a width that is a value; expected a number in "
                "the format: correct it in the checkpoint and build the bundle again"
            )
        for digits in re.findall(r"\d+", " ".join(specs)):
            self.budget.spend(int(digits[:20]))
        self.budget.spend(form.count(mark) * self._weigh(values))

    def _weigh(self, value: Any) -> int:
        return weight(value, self.budget.spend)

    def _size(self, value: Any) -> int:
        """Return what a value weighs without what its elements hold."""
        if isinstance(value, str):
            return 1 + len(value) // UNIT
        return 1 + len(value) if isinstance(value, (dict, *_CONTAINERS)) else 1

    def _weighed(self, value: Any) -> Any:
        weight(value, self.budget.spend)
        return value

    def _shown(self, value: Any) -> Any:
        """Pay for writing a value; return it, or its text."""
        self._weighed(value)
        return shown(value) if isinstance(value, (dict, list, tuple)) else value

    def _filter(self, name: str, function: Any) -> Any:
        """Return a filter that is paid for."""
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            named = {n: kwargs[n] for n in ("old", "new") if n in kwargs} | kwargs  # of `replace`
            value, given = args[skipped], [*args[skipped + 1 :], *named.values()]
            if name not in _FREE and isinstance(value, Iterator):
                value = [*value]
            self._pay_filter(name, value, given)
            if name in _LAZY and value:
                value = _Counted(value, _factor(given), self.budget.spend)
            before, after = args[:skipped], args[skipped + 1 :]

            def operation(*values: Any) -> Any:
                more = dict(zip(kwargs, values[1 + len(after) :], strict=True))
                return function(*before, *values[: 1 + len(after)], **more)

            values = [value, *after, *kwargs.values()]
            result = operation(*values)
            if name not in _FREE:  # those return what is in a value, or numbers
                result = followed(name, operation, values, result)
            return _Lazy(result, value) if name in _LAZY else _check_integer(result)

        return paid

    def _pay_filter(self, name: str, value: Any, values: Sequence[Any]) -> None:
        spend = self.budget.spend
        spend(_CALL)
        if name in _SEQUENCES:
            self._pay_parts([value])
        if name in _FREE:
            self._weighed(values)
        elif name in ("list", "reverse"):
            spend(self._size(value))
        elif name == "replace":
            self._pay_replace(value, *values[:2])
        elif name == "format":
            self._pay_format(str(self._weighed(value)), "%", values)
        elif name in _TIMES:
            self._pay_times(value, values)
            if name in _ORDERING and hasattr(value, "__len__"):
                lists = name == "sum" and any(isinstance(one, (list, tuple)) for one in values)
                compared = len(value) if lists else len(value).bit_length()
                spend(compared * (len(value) + self._weigh(value)))
        else:
            self._weighed([value, *values])

    def _test(self, name: str, test: Any) -> Any:
        """Return a test that is paid for, where it looks at whole values."""
        if name not in _DEEP_TESTS | _NUMBER_TESTS:
            return test

        @functools.wraps(test)
        def paid(*args: Any) -> Any:
            if name in _NUMBER_TESTS and isinstance(args[0], str):
                raise TypeError(f"the test {name!r} is of numbers, not of text")
            return test(*[self.settled(arg) for arg in args])

        return paid


class _Generator(CodeGenerator):
    """Writes prices as calls of the sandbox."""

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:  # noqa: N802
        if (
            node.name not in (_COUNTED, _WEIGHED, _SLICED, _KEY, _PAID, _JOINED)
            or node.node is None
        ):
            super().visit_Filter(node, frame)
            return
        self.write(f"environment.{node.name.strip()}(")
        self.visit(node.node, frame)
        self.signature(node, frame)
        self.write(")")


class _Counted:
    """An iterable that spends steps for each element; as long as what it is over, if that is."""

    def __init__(self, values: Any, each: int, spend: Callable[[int], object]) -> None:
        self._values, self._each, self._spend = values, each, spend

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._spend(self._each)
            yield value

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def depth(self) -> int:
        """How many lazy filters it is the result of."""
        return self._values.depth if isinstance(self._values, _Lazy) else 0


class _Lazy:
    """What a lazy filter yields. Each over another is a level of Python's stack, so few may be."""

    def __init__(self, results: Iterator[Any], values: Any) -> None:
        self.depth = 1 + (values.depth if isinstance(values, _Counted) else 0)
        if self.depth > DEEPEST:
            raise _too_deep("filters over filters")
        self._results = results

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._results)


class _Namespace(Namespace):
    """A namespace, which may hold itself and is no text.

    Its attributes are the template's, but for those that Python and Jinja ask every object for.
    """

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "jinja_pass_arg":
            return object.__getattribute__(self, name)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        raise TypeError("a namespace is not text")


class _Generation(Extension):
    """The `{% generation %}` block of newer templates, which marks and changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Priced(NodeTransformer):
    """Puts prices into a template: a turn of a loop and a call of a macro cost their nodes."""

    def __init__(self) -> None:
        self.nodes = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.nodes += 1
        if type(node) in _REFUSED:
            raise RequestError(
                f"the chat template has {_REFUSED[type(node)]!r} in line {node.lineno}, which no "
                "chat template needs; remove it in the checkpoint and build the bundle again"
            )
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        before = self.nodes
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED, self.nodes - before)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        before = self.nodes
        self.generic_visit(node)
        paid = _filtered(nodes.Const(self.nodes - before), _PAID)
        node.body.insert(0, nodes.ExprStmt(paid, lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, _KEY)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        self.nodes += 1
        _check_integer(node.value)
        return node


def _weighed(node: nodes.Expr) -> nodes.Expr:
    short = isinstance(node, nodes.Const) and len(str(node.value)) <= 4 * UNIT
    return node if short else _filtered(node, _WEIGHED)


def _filtered(node: Any, name: str, *args: int) -> nodes.Filter:
    constants = [nodes.Const(arg) for arg in args]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _check_key(key: Any) -> Any:
    """Refuse lists and ranges as keys: their hashes can be made to collide."""
    if isinstance(key, (str, int, float, type(None), Undefined)):
        return key
    raise RequestError(
        f"the chat template has a key of the type {type(key).__name__!r}; expected text or a "
        "number: correct it in the checkpoint and build the bundle again"
    )


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        _check_key(key)


def _first(pair: Any) -> Any:
    """Return the key of a pair; one that can be read but once counts as a key itself."""
    return pair[0] if isinstance(pair, (str, list, tuple)) and pair else pair


def _check_integer(value: Any) -> Any:
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise RequestError(
            "the chat template computes an integer of more than 64 bits; correct it in the "
            "checkpoint and build the bundle again"
        )
    return value


def _named(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name[:40]!r}"
