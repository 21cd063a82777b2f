"""The jinja sandbox chat templates run in.

A template comes with a model file from a stranger, so it is a program to be contained: it sees
plain data, changes nothing, and its work and its output are bounded. What it can use is what
Hugging Face documents for chat templates
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
"""Processor time one rendering may take."""
MAX_CHARS = 1 << 26
"""Longest text a template may build; a thousand times a usual context."""
_MAX_BITS = 1 << 12

_deadline: ContextVar[float] = ContextVar("deadline")


class Refusal(JinjaError):
    """The template itself says no, in its own words."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks what a model is trained to say."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _PlainNamespace(Namespace):
    """A namespace without underscored names, which lead to the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} is not allowed in a namespace")


def _raise_exception(message: object) -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 1


class _Bounded(NodeTransformer):
    """Puts a look at the clock into every loop and macro, and a limit on every `~` and `+`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_time_is_left()))
        if node.test is not None:
            node.test = nodes.And(_time_is_left(), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_time_is_left()))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        method = nodes.EnvironmentAttribute("join_text")
        return nodes.Call(method, node.nodes, [], None, None)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        # Templates put texts together by long chains of `+`: one call for all is much quicker.
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            operands.append(self.visit(left.right))
            left = left.left
        operands.reverse()
        return nodes.Filter(self.visit(left), "+", operands, [], None, None)


def _time_is_left() -> nodes.Test:
    """A look at the clock; a test is called at once where a function goes through the sandbox.

    So is a filter. No template can write the names of ours.
    """
    return nodes.Test(nodes.Const(True), "in time", [], [], None, None)


@pass_context
def _check_time(_context: Context, _: bool) -> bool:
    """Return true while there is time left."""
    if time.thread_time() > _deadline.get():
        raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")
    return True


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.filters["+"] = self.sum_of
        self.tests["in time"] = _check_time
        self.globals.update(raise_exception=_raise_exception, dict=_dict, namespace=_PlainNamespace)
        del self.globals["lipsum"]

    def compile_bounded(self, source: str) -> Template:
        """Compile a template whose loops and macros watch the clock.

        Raises:
            jinja2.TemplateSyntaxError: the source is not a template.
        """
        tree = _Bounded().visit(self.parse(source)).set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Return what the template writes.

        Raises:
            Refusal: the template called `raise_exception`.
            Exception: whatever a faulty template runs into.
        """
        token = _deadline.set(time.thread_time() + MAX_SECONDS)
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                self._check_size(length)
        finally:
            _deadline.reset(token)
        return "".join(pieces)

    def join_text(self, *values: object) -> str:
        """Return the values as one text: the operator `~`."""
        texts = [str(value) for value in values]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def sum_of(self, first: Any, *others: Any) -> Any:
        """Return the sum of the values, from left to right: the operator `+`."""
        if type(first) is str and all([type(value) is str for value in others]):
            self._check_size(len(first) + sum(map(len, others)))
            return first + "".join(others)
        for value in others:
            if isinstance(first, int) and isinstance(value, int):
                self._check_bits(first.bit_length())
            else:
                self._check_size(_size(first) + _size(value))
            first = first + value
        return first

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can build something huge, unless it would."""
        if isinstance(left, int) and isinstance(right, int):
            by = {"*": right.bit_length(), "**": left.bit_length() * (right - 1)}
            self._check_bits(left.bit_length() + by[operator])
        elif operator == "*":
            count = left if isinstance(left, int) else right
            if isinstance(count, int):
                self._check_size(max(_size(left), _size(right)) * count)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have this attribute; a shorter way for the busiest of all."""
        if type(obj) is LoopContext:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def _check_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise SecurityError("it computes an enormous number")

    def _check_size(self, size: int) -> None:
        if size > MAX_CHARS:
            raise SecurityError(f"it writes more than {MAX_CHARS} characters")
